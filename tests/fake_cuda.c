/* A CUDA driver without a GPU, two devices of it: memory is the host's, and nothing is computed. Launches are
   reported to a function; functions that are not in `table` do nothing and succeed. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
typedef void *P;
typedef uint64_t U64;

enum { SUCCESS, INVALID_CONTEXT = 201, MAJOR = 75, MINOR = 76, HAS_POOLS = 115, DEPTH = 64 };

static int contexts[2];
static __thread P stack[DEPTH];
static __thread int depth;
static int n_events, n_live, n_made;

typedef Result (*OnLaunch)(const char *name, const unsigned *grid, P stream, P context, P *arguments);
static OnLaunch on_launch;

void fake_on_launch(OnLaunch function) { on_launch = function; }
int fake_events(void) { return n_events; }
int fake_live(void) { return n_live; }   /* allocations */
int fake_made(void) { return n_made; }
int fake_depth(void) { return depth; }   /* of the thread's stack of contexts */
int fake_device(P context) { return (int)((int *)context - contexts); }

static P top(void) { return depth ? stack[depth - 1] : 0; }

static Result allocate(P *address, size_t nbytes)
{
    *address = aligned_alloc(512, (nbytes + 511) / 512 * 512);
    memset(*address, 255, nbytes);
    __sync_add_and_fetch(&n_live, 1);
    __sync_add_and_fetch(&n_made, 1);
    return SUCCESS;
}

static Result succeed(void) { return SUCCESS; }
static Result version(int *number) { *number = 13000; return SUCCESS; }
static Result count(int *number) { *number = 2; return SUCCESS; }
static Result device(int *device, int number) { *device = number; return SUCCESS; }
static Result name_of(char *name, int room, int d) { strncpy(name, "fake", room); return SUCCESS; }
static Result uuid(char *bytes, int d) { memset(bytes, 1 + d, 16); return SUCCESS; }
static Result attribute(int *value, int which, int d)
{
    *value = which == MAJOR ? 9 : which == MINOR ? 0 : which == HAS_POOLS ? 1 : 1024;
    return SUCCESS;
}
static Result retain(P *context, int d) { *context = contexts + d; return SUCCESS; }
static Result current(P *context) { *context = top(); return SUCCESS; }
static Result push(P context) { stack[depth++] = context; return SUCCESS; }
static Result set(P context) { depth += !depth; stack[depth - 1] = context; return SUCCESS; }
static Result pop(P *context)
{
    if (!depth)
        return INVALID_CONTEXT;
    depth--;
    if (context)
        *context = stack[depth];
    return SUCCESS;
}
static Result current_device(int *d) { *d = fake_device(top()); return depth ? SUCCESS : INVALID_CONTEXT; }
static Result context_version(P context, unsigned *number) { *number = 13000; return SUCCESS; }
static Result context_of(P stream, P *context) { *context = top(); return SUCCESS; }
static Result pool(P *pool, int d) { *pool = (P)(U64)(256 + d); return SUCCESS; }
static Result from_pool(P *address, size_t nbytes, P pool, P stream) { return allocate(address, nbytes); }
static Result on_stream(P *address, size_t nbytes, P stream) { return allocate(address, nbytes); }
static Result release(P address) { free(address); __sync_add_and_fetch(&n_live, -1); return SUCCESS; }
static Result fill(P address, unsigned char x, size_t n) { memset(address, x, n); return SUCCESS; }
static Result copy(P to, P from, size_t nbytes) { memcpy(to, from, nbytes); return SUCCESS; }
static Result event(P *event, unsigned flags) { *event = (P)(U64)++n_events; return SUCCESS; }
static Result load(P *library) { *library = malloc(16); return SUCCESS; }
static Result kernel(P *kernel, P library, const char *name) { *kernel = strdup(name); return SUCCESS; }
static Result of_kernel(int *value) { *value = 0; return SUCCESS; }
static Result memory_info(size_t *left, size_t *all) { *left = *all = (size_t)1 << 36; return SUCCESS; }
static Result of_pointer(P value, int which, U64 address) { *(int *)value = 0; return SUCCESS; }
static Result of_pointers(unsigned n, const int *which, P *values, U64 address)
{
    for (unsigned i = 0; i < n; i++) /* the kind of memory is that of a device */
        *(int *)values[i] = which[i] == 2 ? 2 : 0;
    return SUCCESS;
}
static Result launch(P name, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                     unsigned shared, P stream, P *arguments, P *extra)
{
    const unsigned grid[] = {gx, gy, gz, bx, by, bz, shared};
    return on_launch ? on_launch(name, grid, stream, top(), arguments) : SUCCESS;
}
struct Config {
    unsigned grid[7];
    P stream;
};
static Result launch_ex(const struct Config *config, P name, P *arguments, P *extra)
{
    return on_launch ? on_launch(name, config->grid, config->stream, top(), arguments) : SUCCESS;
}
static Result error_name(Result error, const char **text) { *text = "CUDA_ERROR_FAKE"; return SUCCESS; }
static Result error_text(Result error, const char **text) { *text = "this is a fake"; return SUCCESS; }

static const struct {
    const char *name;
    P function;
} table[] = {
    {"cuCtxGetApiVersion", context_version}, {"cuCtxGetCurrent", current}, {"cuCtxGetDevice", current_device},
    {"cuCtxPopCurrent", pop}, {"cuCtxPushCurrent", push}, {"cuCtxSetCurrent", set}, {"cuDeviceGet", device},
    {"cuDeviceGetAttribute", attribute}, {"cuDeviceGetCount", count}, {"cuDeviceGetDefaultMemPool", pool},
    {"cuDeviceGetMemPool", pool}, {"cuDeviceGetName", name_of}, {"cuDeviceGetUuid", uuid},
    {"cuDevicePrimaryCtxRetain", retain}, {"cuDriverGetVersion", version}, {"cuEventCreate", event},
    {"cuEventCreateWithFlags", event}, {"cuGetErrorName", error_name}, {"cuGetErrorString", error_text},
    {"cuKernelGetAttribute", of_kernel}, {"cuLaunchKernel", launch}, {"cuLaunchKernelEx", launch_ex},
    {"cuLibraryGetKernel", kernel}, {"cuLibraryLoadData", load}, {"cuMemAlloc", allocate},
    {"cuMemAllocAsync", on_stream}, {"cuMemAllocFromPoolAsync", from_pool}, {"cuMemFree", release},
    {"cuMemFreeAsync", release}, {"cuMemGetInfo", memory_info}, {"cuMemcpyDtoH", copy},
    {"cuMemcpyDtoHAsync", copy}, {"cuMemcpyHtoD", copy}, {"cuMemcpyHtoDAsync", copy}, {"cuMemsetD8", fill},
    {"cuMemsetD8Async", fill}, {"cuPointerGetAttribute", of_pointer}, {"cuPointerGetAttributes", of_pointers},
    {"cuStreamGetCtx", context_of},
};

Result cuGetProcAddress_v2(const char *name, P *function, int number, U64 flags, int *status)
{
    *function = succeed;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (!strcmp(table[i].name, name))
            *function = table[i].function;
    if (status)
        *status = 0;
    return SUCCESS;
}
Result cuGetProcAddress(const char *name, P *function, int number, U64 flags)
{
    return cuGetProcAddress_v2(name, function, number, flags, 0);
}
Result cuInit(unsigned flags) { return SUCCESS; }
Result cuDriverGetVersion(int *number) { return version(number); }
