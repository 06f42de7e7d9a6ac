/* Runs the kernels of `amx` on a CPU that has AVX-512 and no tile unit: each tile instruction traps there as one that
 * does not exist, and is carried out by the C model of tile_unit.h. What is tested so is the object that hardware runs:
 * its vector code, the operands of its tile instructions, and the order in which the compiler has put them. */

#if defined(__linux__)

#define _GNU_SOURCE
#include <signal.h>
#include <string.h>
#include <ucontext.h>

#include "kernels.h"
#include "fused.h"
#include "tile_emulator.h"

#define FASTATTN_MODEL
#include "tile_unit.h"

/* VEX-encoded instructions of the second opcode map without a vector length: prefix, two bytes with the inverted high
 * bits of the registers and the third operand, opcode, modrm. */
enum { OPCODE_CONFIG = 0x49, OPCODE_MOVE = 0x4b, OPCODE_PRODUCT = 0x5c };
enum { NO_PREFIX = 0, PREFIX_F3 = 2, PREFIX_F2 = 3 };

static int is_configured;

/* Base plus displacement of a memory operand whose modrm byte is at `at`, its index times its scale, and its bytes. */
static char *address_of(const greg_t *registers, const uint8_t *at, int high_base, int high_index, long *step,
                        int *nbytes) {
    static const int number[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                 REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    const int mod = at[0] >> 6, has_sib = (at[0] & 7) == 4;
    const int base = (has_sib ? at[1] & 7 : at[0] & 7), index = at[1] >> 3 & 7;
    const int is_absolute = mod == 0 && base == 5, wide = mod == 2 || is_absolute;
    char *start = NULL;
    *step = 0;
    *nbytes = 1 + has_sib;
    if (!is_absolute) start = (char *)registers[number[base | high_base << 3]];
    if (has_sib && (index | high_index << 3) != 4)
        *step = (long)registers[number[index | high_index << 3]] << (at[1] >> 6);
    if (mod == 1) {
        start += (int8_t)at[*nbytes];
        *nbytes += 1;
    } else if (wide) {
        int32_t displacement;
        memcpy(&displacement, at + *nbytes, 4);
        start += displacement;
        *nbytes += 4;
        /* From the end of the instruction, whose first four bytes come before modrm. */
        if (is_absolute && !has_sib) start = (char *)at + *nbytes + displacement;
    }
    return start;
}

/* Whether the configuration is the one that all kernels have: eight tiles of 16 rows of 64 bytes. */
static int is_usual(const char *config) {
    uint8_t wanted[64] = {1};
    for (int tile = 0; tile < 8; tile++) {
        wanted[16 + 2 * tile] = 64;
        wanted[48 + tile] = TILE_SIDE;
    }
    return memcmp(config, wanted, 64) == 0;
}

/* Carries out the instruction at `at`; returns how many bytes it has, 0 for one that is not known. */
static int execute(const greg_t *registers, const uint8_t *at) {
    if (at[0] != 0xc4 || (at[1] & 0x1f) != 2) return 0;
    const int high_reg = !(at[1] >> 7), high_index = !(at[1] >> 6 & 1), high_base = !(at[1] >> 5 & 1);
    const int third = ~at[2] >> 3 & 15, prefix = at[2] & 3, opcode = at[3], modrm = at[4];
    const int is_memory = modrm >> 6 != 3, reg = (modrm >> 3 & 7) | high_reg << 3, rm = (modrm & 7) | high_base << 3;
    int nbytes = 1;
    long step = 0;
    char *const memory = is_memory ? address_of(registers, at + 4, high_base, high_index, &step, &nbytes) : NULL;
    if (opcode == OPCODE_CONFIG && prefix == NO_PREFIX && (is_memory || modrm == 0xc0)) {
        if (is_memory && !is_usual(memory)) return 0;
        is_configured = is_memory;
        if (is_memory)
            tiles_begin();
        else
            tiles_end();
        return 4 + nbytes;
    }
    if (!is_configured || reg >= 8) return 0;
    if (opcode == OPCODE_CONFIG && prefix == PREFIX_F2 && !is_memory) {
        TILE_ZERO(reg);
    } else if (opcode == OPCODE_MOVE && prefix == PREFIX_F2 && is_memory && step == 64) {
        TILE_LOAD(reg, memory); /* of rows one after the other, as all kernels have them */
    } else if (opcode == OPCODE_MOVE && prefix == PREFIX_F3 && is_memory) {
        TILE_STORE(reg, memory, step);
    } else if (opcode == OPCODE_PRODUCT && prefix == PREFIX_F3 && !is_memory && rm < 8 && third < 8) {
        TILE_PRODUCT(reg, rm, third);
    } else {
        return 0;
    }
    return 4 + nbytes;
}

static void on_invalid_instruction(int number, siginfo_t *info, void *context) {
    (void)info;
    greg_t *const registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const int nbytes = execute(registers, (const uint8_t *)registers[REG_RIP]);
    if (nbytes == 0) signal(number, SIG_DFL); /* it is run again, and ends the process */
    registers[REG_RIP] += nbytes;
}

extern const fastattn_fused fastattn_fused_amx;

const fastattn_kernels *emulated_amx(void) {
    static fastattn_kernels all;
    const fastattn_kernels *const vectors = fastattn_find_kernels("avx512", 4);
    struct sigaction action = {.sa_sigaction = on_invalid_instruction, .sa_flags = SA_SIGINFO};
    if (!vectors || sigaction(SIGILL, &action, NULL) != 0) return NULL;
    all = *vectors;
    all.isa = "amx";
    all.fused = &fastattn_fused_amx;
    return &all;
}

#endif
