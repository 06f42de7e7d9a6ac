/* Tests of the micro-kernels against plain loops, through the table that kernels.h describes.
 *
 *     test_kernels ISA...
 *
 * `tests/kernels/run` builds and runs it. Where only the right elements matter the numbers are small integers
 * and the answer must be exact; where rounding matters the bound is derived beside the check. The random
 * numbers are the same in every run.
 */

#include "support.h"

#include "probes.h"

#if defined(FASTATTN_HAVE_AMX) && defined(__linux__)
#include "tile_emulator.h"
#define EMULATED_AMX emulated_amx()
#else
#define EMULATED_AMX NULL
#endif

#include "test_lanes.c"
#include "test_rows.c"
#include "test_storage.c"
#include "test_backward.c"
#include "test_rope.c"
#include "test_linear.c"
#include "test_recurrent.c"
#include "test_conv.c"
#include "test_recurrent_gradient.c"
#include "test_reductions.c"
#include "test_inputs.c"
#include "test_independence.c"
#include "test_fused.c"
#include "test_pairs.c"

static void test_peaks(void) {
    const fastattn_probes *probes = fastattn_find_probes(kernels->isa);
    double (*fma_peak)(long) = size == 4 ? probes->fma_peak_float : probes->fma_peak_double;
    const double one = fma_peak(1);
    CHECK(one >= 2.0 * lanes && fmod(one, 2.0 * lanes) == 0, "FLOPs of one step: " NUMBER, one);
    CHECK(fma_peak(1000) == 1000 * one, "FLOPs of 1000 steps");
    CHECK(probes->integer_peak(1000) == 1000 * probes->integer_peak(1), "additions of 1000 steps");
}

static const struct {
    const char *name;
    void (*run)(void);
} tests[] = {
    {"pack", test_pack},
    {"unpack", test_unpack},
    {"score", test_score},
    {"adjust", test_adjust},
    {"add_bias", test_add_bias},
    {"softmax", test_softmax},
    {"accumulate", test_accumulate},
    {"accumulate_nonfinite", test_accumulate_nonfinite},
    {"rounding", test_rounding},
    {"finish", test_finish},
    {"pack_rows", test_pack_rows},
    {"unpack_rows", test_unpack_rows},
    {"score_rows", test_score_rows},
    {"adjust_rows", test_adjust_rows},
    {"softmax_rows", test_softmax_rows},
    {"accumulate_rows", test_accumulate_rows},
    {"accumulate_rows_nonfinite", test_accumulate_rows_nonfinite},
    {"masked_keys_around", test_masked_keys_around},
    {"merge", test_merge},
    {"rounding_rows", test_rounding_rows},
    {"load_row", test_load_row},
    {"load_row_real", test_load_row_real},
    {"load_row_int8", test_load_row_int8},
    {"store_row", test_store_row},
    {"limit_row", test_limit_row},
    {"store_row_layouts", test_store_row_layouts},
    {"rows_of_each_storage", test_rows_of_each_storage},
    {"rope", test_rope},
    {"linear", test_linear},
    {"recurrent", test_recurrent},
    {"conv", test_conv},
    {"recurrent_gradient", test_recurrent_gradient},
    {"topk_keys", test_topk_keys},
    {"max_keys", test_max_keys},
    {"dot", test_dot},
    {"has_nonfinite", test_has_nonfinite},
    {"differentiate", test_differentiate},
    {"largest_square", test_largest_square},
    {"find_largest", test_find_largest},
    {"add_columns", test_add_columns},
    {"uncap", test_uncap},
    {"drop", test_drop},
    {"draw_words", test_draw_words},
    {"mask_words", test_mask_words},
    {"convert", test_convert},
    {"copy_rows", test_copy_rows},
    {"lanes_are_independent", test_lanes_are_independent},
    {"rows_are_independent", test_rows_are_independent},
    {"peaks", test_peaks},
};

/* The checks of one table, and what its line has to say about errors. */
static void test_table(char *errors, size_t room) {
    double tanh_at = 0, exp2_at = 0;
    for (int t = 0; t < COUNT(tests); t++) {
        current = tests[t].name;
        tests[t].run();
    }
    current = "exp2";
    const double exp2_error = worst_exp2(&exp2_at);
    CHECK(exp2_error <= 1.5, "%g ULP at " NUMBER, exp2_error, exp2_at);
    current = "tanh";
    const double tanh_error = worst_tanh(&tanh_at);
    CHECK(tanh_error <= 5, "%g ULP at " NUMBER, tanh_error, tanh_at);
    snprintf(errors, room, "exp2 %.3f ULP at %.9g, tanh %.2f ULP at %.9g", exp2_error, exp2_at, tanh_error, tanh_at);
}

int main(int argc, char **argv) {
    char errors[200] = "";
    if (argc < 2) return printf("usage: test_kernels ISA...\n"), 2;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int i = 1; i < argc; i++)
        for (size = 4; size <= 8; size += 4) {
            kernels = fastattn_find_kernels(argv[i], size);
            if (!kernels && size == 4 && strcmp(argv[i], "amx") == 0) kernels = EMULATED_AMX;
            if (!kernels) {
                printf("%s float%d: skipped, this CPU does not have it\n", argv[i], size * 8);
                continue;
            }
            const long checks_before = checks, failures_before = failures;
            const int is_extended = strcmp(kernels->isa, kernels->vectors) != 0;
            lanes = kernels->lanes;
            unit = size == 4 ? 0x1p-24L : 0x1p-53L;
            current = "table";
            CHECK(strcmp(kernels->isa, argv[i]) == 0, "the table of %s calls itself %s", argv[i], kernels->isa);
            CHECK(!fastattn_find_kernels("none", size), "a table for an ISA that does not exist");
            CHECK((kernels->fused || kernels->pairs) == (is_extended && size == 4), "other kernels in the wrong table");
            if (is_extended && size == 8) continue;
            if (lanes * kernels->max_vectors > 64) return printf("no room for %d vectors\n", kernels->max_vectors), 1;
            /* The rest of its kernels are those of another table. */
            if (!is_extended) test_table(errors, sizeof errors);
            if (kernels->pairs) test_pairs(errors, sizeof errors);
            if (kernels->fused) test_fused(errors, sizeof errors);
            printf("%s float%d: %ld checks, %ld failed; largest error: %s\n", argv[i], size * 8,
                   checks - checks_before, failures - failures_before, errors);
        }
    return failures > 0;
}
