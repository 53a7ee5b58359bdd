/* Matrix products in int8 with exact sums, for x86 with AVX2, AVX-512 VNNI or AMX.
 *
 * The results have the same bits as those that integer_linear.py computes with torch's
 * operators. Compile with -ffp-contract=off, so that every operation on floats is
 * rounded.
 *
 * A row of activations becomes two rows of integers, high and low, from -64 to 64. The
 * instructions multiply unsigned by signed bytes. So weights are stored with 128 added,
 * and 128 times the sum of a row's integers is subtracted from each sum of the row.
 *
 * Weights are stored in blocks of 32 outputs. For every four inputs, a block has four
 * bytes of each output; one instruction multiplies and adds them. All kinds of
 * instructions read the same layout.
 */

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XTILEDATA 18

#define LEVELS 63
#define FINER 128
#define BLOCK 32 /* outputs */
#define FEW 8    /* minimum rows for which tiles pay off */
/* Bytes by which prefetches of weights are ahead. With 16 KiB, one row of SmolLM2 takes
 * a quarter less time on a Xeon, with 4 KiB a fifth. An address may be past the end. */
#define AHEAD 16384

enum { NONE, AVX2, VNNI, AMX };

typedef struct {
    const uint8_t *weights; /* blocks of [inputs / 4][32][4] */
    const float *scale;     /* [blocks * 32] */
    const int32_t *outputs; /* of each linear; its blocks follow the previous ones */
    int32_t linears;
    int32_t inputs; /* a multiple of 4, padded with zeros */
} Packed;

/* Destination of the results of a block. */
typedef struct {
    float *found; /* of the first row */
    long stride;  /* from a row to the next */
    int width;    /* outputs that exist */
} Place;

/* Return the best kind of instructions that this process may use. Linux permits tiles
 * only to processes that ask for them. */
int multiworld_best(void) {
    unsigned a, b, c, d;
    __builtin_cpu_init();
    int has_vnni =
        __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512vnni");
    if (!has_vnni)
        return __builtin_cpu_supports("avx2") ? AVX2 : NONE;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 24 & 1) || !(d >> 25 & 1))
        return VNNI;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) ? VNNI : AMX;
}

static Place place_of(const Packed *packed, long block, long rows, float *found) {
    int linear = 0;
    for (;; linear++) {
        long blocks = (packed->outputs[linear] + BLOCK - 1) / BLOCK;
        if (block < blocks)
            break;
        block -= blocks;
        found += rows * packed->outputs[linear];
    }
    long stride = packed->outputs[linear], begin = block * BLOCK;
    int width = stride - begin < BLOCK ? (int)(stride - begin) : BLOCK;
    return (Place){found + begin, stride, width};
}

/* Write a row's integers, [2, inputs], its factor, and 128 times the sum of each row of
 * integers. Magnitudes are compared by their bits, which is also right for NaN. */
static inline __attribute__((always_inline)) void
write_row(const float *restrict row, long given, long inputs, int8_t *restrict high,
          int8_t *restrict low, float *factor, int32_t *sums) {
    int32_t largest = 0;
    for (long at = 0; at < given; at++) {
        int32_t bits;
        memcpy(&bits, row + at, 4);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    if (largest >= 0x7f800000) { /* not finite: the results are NaN */
        memset(high, 0, inputs);
        memset(low, 0, inputs);
        *factor = __builtin_nanf("");
        sums[0] = sums[1] = 0;
        return;
    }
    float magnitude;
    memcpy(&magnitude, &largest, 4);
    magnitude = magnitude < 1e-30f ? 1e-30f : magnitude;
    magnitude *= (float)(1.0 / LEVELS);
    int32_t sum_high = 0, sum_low = 0;
    for (long at = 0; at < given; at++) {
        float exact = row[at] / magnitude;
        float coarse = __builtin_rintf(exact);
        float fine = __builtin_rintf((exact - coarse) * FINER);
        int32_t coarse_int = (int32_t)coarse, fine_int = (int32_t)fine;
        high[at] = (int8_t)coarse_int;
        low[at] = (int8_t)fine_int;
        sum_high += (int8_t)coarse_int;
        sum_low += (int8_t)fine_int;
    }
    for (long at = given; at < inputs; at++)
        high[at] = low[at] = 0;
    *factor = magnitude;
    sums[0] = 128 * sum_high;
    sums[1] = 128 * sum_low;
}

/* ---- AVX-512 with VNNI ---- */

#define FOR_VNNI                                                                       \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")))

FOR_VNNI static void write_row_vnni(const float *row, long given, long inputs,
                                    int8_t *high, int8_t *low, float *factor,
                                    int32_t *sums) {
    write_row(row, given, inputs, high, low, factor, sums);
}

/* Store up to 16 results of a row. */
FOR_VNNI static inline void store_vnni(__m512i high, __m512i low, const float *scale,
                                       float factor, float *found, int width) {
    __m512 scales = _mm512_loadu_ps(scale);
    __m512 sum = _mm512_mul_ps(_mm512_cvtepi32_ps(high), scales);
    __m512 less = _mm512_mul_ps(_mm512_cvtepi32_ps(low), scales);
    sum = _mm512_add_ps(sum, _mm512_mul_ps(less, _mm512_set1_ps(1.0f / FINER)));
    sum = _mm512_mul_ps(sum, _mm512_set1_ps(factor));
    __mmask16 kept = width >= 16 ? 0xffff : width > 0 ? (1u << width) - 1 : 0;
    _mm512_mask_storeu_ps(found, kept, sum);
}

/* Multiply a block by ``count`` rows, of two rows of integers each. */
#define BLOCK_VNNI(name, count)                                                        \
    FOR_VNNI static void name(const uint8_t *weights, const float *scale,              \
                              const int8_t *integers, long inputs,                     \
                              const float *factor, const int32_t *offsets,             \
                              Place place) {                                           \
        __m512i sums[2 * count][2];                                                    \
        _Pragma("GCC unroll 12") for (int row = 0; row < 2 * count; row++)             \
            sums[row][0] = sums[row][1] = _mm512_set1_epi32(-offsets[row]);            \
        for (long at = 0; at < inputs; at += 4, weights += 4 * BLOCK) {                \
            __m512i first = _mm512_loadu_si512(weights);                               \
            __m512i second = _mm512_loadu_si512(weights + 64);                         \
            _mm_prefetch(weights + AHEAD, _MM_HINT_T1);                                \
            _mm_prefetch(weights + AHEAD + 64, _MM_HINT_T1);                           \
            _Pragma("GCC unroll 12") for (int row = 0; row < 2 * count; row++) {       \
                int32_t four;                                                          \
                memcpy(&four, integers + row * inputs + at, 4);                        \
                __m512i given = _mm512_set1_epi32(four);                               \
                sums[row][0] = _mm512_dpbusd_epi32(sums[row][0], first, given);        \
                sums[row][1] = _mm512_dpbusd_epi32(sums[row][1], second, given);       \
            }                                                                          \
        }                                                                              \
        _Pragma("GCC unroll 6") for (int row = 0; row < count; row++)                  \
            _Pragma("GCC unroll 2") for (int half = 0; half < 2; half++)               \
                store_vnni(sums[2 * row][half], sums[2 * row + 1][half],               \
                           scale + 16 * half, factor[row],                             \
                           place.found + row * place.stride + 16 * half,               \
                           place.width - 16 * half);                                   \
    }

BLOCK_VNNI(block_vnni_1, 1)
BLOCK_VNNI(block_vnni_2, 2)
BLOCK_VNNI(block_vnni_4, 4)
BLOCK_VNNI(block_vnni_6, 6)

static void multiply_vnni(const uint8_t *weights, const float *scale,
                          const int8_t *integers, long inputs, const float *factor,
                          const int32_t *offsets, Place place, long rows) {
    while (rows) {
        int count = rows >= 6 ? 6 : rows >= 4 ? 4 : rows >= 2 ? 2 : 1;
        (count == 6   ? block_vnni_6
         : count == 4 ? block_vnni_4
         : count == 2 ? block_vnni_2
                      : block_vnni_1)(weights, scale, integers, inputs, factor, offsets,
                                      place);
        rows -= count, integers += 2 * count * inputs, factor += count;
        offsets += 2 * count, place.found += count * place.stride;
    }
}

/* ---- AMX: tiles of 16 rows of 64 bytes ---- */

#define FOR_AMX                                                                        \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,"             \
                          "amx-tile,amx-int8")))

#define EIGHT(number) number, number, number, number, number, number, number, number

/* A constant, because GCC's ldtilecfg is said to read only eight bytes of it. */
static const struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TILES = {.palette = 1, .bytes = {EIGHT(64)}, .rows = {EIGHT(16)}};

FOR_AMX static void begin_amx(void) { _tile_loadconfig(&TILES); }

FOR_AMX static void end_amx(void) { _tile_release(); }

/* Tiles 0 to 3 are sums, 4 and 5 rows of integers, 6 and 7 weights. Up to 32 rows of
 * integers are read at a time; ``integers`` has room for them. */
FOR_AMX static void multiply_amx(const uint8_t *weights, const float *scale,
                                 const int8_t *integers, long inputs,
                                 const float *factor, const int32_t *offsets,
                                 Place place, long rows) {
    int32_t sums[32][BLOCK] __attribute__((aligned(64)));
    for (; rows > 0; rows -= 16) {
        const int has_second = rows > 8;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (long at = 0; at < inputs; at += 64) {
            _tile_loadd(6, weights + at * BLOCK, 4 * BLOCK);
            _tile_loadd(7, weights + at * BLOCK + 64, 4 * BLOCK);
            _tile_loadd(4, integers + at, inputs);
            _tile_dpbsud(0, 4, 6);
            _tile_dpbsud(1, 4, 7);
            if (has_second) {
                _tile_loadd(5, integers + 16 * inputs + at, inputs);
                _tile_dpbsud(2, 5, 6);
                _tile_dpbsud(3, 5, 7);
            }
        }
        _tile_stored(0, sums[0], sizeof(sums[0]));
        _tile_stored(1, sums[0] + 16, sizeof(sums[0]));
        if (has_second) {
            _tile_stored(2, sums[16], sizeof(sums[0]));
            _tile_stored(3, sums[16] + 16, sizeof(sums[0]));
        }
        for (int row = 0; row < 16 && row < rows; row++) {
            __m512i more = _mm512_set1_epi32(offsets[2 * row]);
            __m512i less = _mm512_set1_epi32(offsets[2 * row + 1]);
            for (int at = 0; at < BLOCK; at += 16) {
                __m512i high = _mm512_load_si512(sums[2 * row] + at);
                __m512i low = _mm512_load_si512(sums[2 * row + 1] + at);
                store_vnni(_mm512_sub_epi32(high, more), _mm512_sub_epi32(low, less),
                           scale + at, factor[row],
                           place.found + row * place.stride + at, place.width - at);
            }
        }
        integers += 32 * inputs, factor += 16, offsets += 32;
        place.found += 16 * place.stride;
    }
}

/* ---- AVX2 ---- */

#define FOR_AVX2 __attribute__((target("avx2")))

FOR_AVX2 static void write_row_avx2(const float *row, long given, long inputs,
                                    int8_t *high, int8_t *low, float *factor,
                                    int32_t *sums) {
    write_row(row, given, inputs, high, low, factor, sums);
}

/* The sum of two products is at most 2 x 255 x 64, which fits into 16 bits. */
FOR_AVX2 static inline __m256i add_products(__m256i sums, __m256i weights,
                                            __m256i given) {
    __m256i pairs = _mm256_maddubs_epi16(weights, given);
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

FOR_AVX2 static void multiply_avx2(const uint8_t *weights, const float *scale,
                                   const int8_t *integers, long inputs,
                                   const float *factor, const int32_t *offsets,
                                   Place place, long rows) {
    for (; rows; rows--) {
        __m256i high[4], low[4];
        for (int part = 0; part < 4; part++) {
            high[part] = _mm256_set1_epi32(-offsets[0]);
            low[part] = _mm256_set1_epi32(-offsets[1]);
        }
        const uint8_t *from = weights;
        for (long at = 0; at < inputs; at += 4, from += 4 * BLOCK) {
            int32_t four[2];
            memcpy(four, integers + at, 4);
            memcpy(four + 1, integers + inputs + at, 4);
            __m256i given_high = _mm256_set1_epi32(four[0]);
            __m256i given_low = _mm256_set1_epi32(four[1]);
            _mm_prefetch(from + AHEAD, _MM_HINT_T1);
            _mm_prefetch(from + AHEAD + 64, _MM_HINT_T1);
            _Pragma("GCC unroll 4") for (int part = 0; part < 4; part++) {
                __m256i here = _mm256_loadu_si256((const __m256i *)(from + 32 * part));
                high[part] = add_products(high[part], here, given_high);
                low[part] = add_products(low[part], here, given_low);
            }
        }
        const __m256 finer = _mm256_set1_ps(1.0f / FINER);
        float found[BLOCK];
        for (int part = 0; part < 4; part++) {
            __m256 scales = _mm256_loadu_ps(scale + 8 * part);
            __m256 sum = _mm256_mul_ps(_mm256_cvtepi32_ps(high[part]), scales);
            __m256 less = _mm256_mul_ps(_mm256_cvtepi32_ps(low[part]), scales);
            sum = _mm256_add_ps(sum, _mm256_mul_ps(less, finer));
            sum = _mm256_mul_ps(sum, _mm256_set1_ps(*factor));
            _mm256_storeu_ps(found + 8 * part, sum);
        }
        memcpy(place.found, found, place.width * sizeof(float));
        integers += 2 * inputs, factor++, offsets += 2, place.found += place.stride;
    }
}

/* Multiply rows, [rows, given], by packed weights. ``found`` gets the results of each
 * linear, [rows, outputs], one after the other. ``scratch`` has room for the factor and
 * the sums of each row, and for the integers of full tiles. ``kind`` is at most
 * ``multiworld_best()``. */
void multiworld_multiply(const Packed *packed, const float *rows, long count,
                         long given, float *found, uint8_t *scratch, int threads,
                         int kind) {
    long inputs = packed->inputs, blocks = 0;
    float *factor = (float *)scratch;
    int32_t *offsets = (int32_t *)(factor + count);
    int8_t *integers = (int8_t *)(offsets + 2 * count);
    for (int linear = 0; linear < packed->linears; linear++)
        blocks += (packed->outputs[linear] + BLOCK - 1) / BLOCK;
    if (kind == AMX && (count < FEW || inputs % 64))
        kind = VNNI;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long row = 0; row < count; row++) {
            int8_t *here = integers + 2 * row * inputs;
            (kind == AVX2 ? write_row_avx2 : write_row_vnni)(
                rows + row * given, given, inputs, here, here + inputs, factor + row,
                offsets + 2 * row);
        }
        if (kind == AMX)
            begin_amx();
#pragma omp for schedule(static)
        for (long block = 0; block < blocks; block++)
            (kind == AVX2   ? multiply_avx2
             : kind == VNNI ? multiply_vnni
                            : multiply_amx)(
                packed->weights + block * BLOCK * inputs, packed->scale + block * BLOCK,
                integers, inputs, factor, offsets,
                place_of(packed, block, count, found), count);
        if (kind == AMX)
            end_amx();
    }
}

#else

int multiworld_best(void) { return 0; }

#endif
