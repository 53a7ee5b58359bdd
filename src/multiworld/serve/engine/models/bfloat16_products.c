/* Matrix products of bfloat16 numbers, for x86 with AVX2, AVX-512, AVX512-BF16 or AMX.
 *
 * Every output of every row is summed over the inputs in the same order, whatever the
 * number of rows and threads: a row has the same bits in a call of any size. Results of
 * different kinds of instructions may differ in their rounding.
 *
 * Weights are stored in blocks of 32 outputs. For every two inputs, a block has the two
 * numbers of each output side by side; one instruction multiplies and adds both. All
 * kinds of instructions read the same layout.
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

#define BLOCK 32 /* outputs */
#define FEW 16   /* minimum rows for which tiles pay off */
/* Bytes by which prefetches of weights are ahead. An address may be past the end. */
#define AHEAD 8192

enum { NONE, AVX2, AVX512, BF16, AMX };

typedef struct {
    const uint16_t *weights; /* blocks of [inputs / 2][32][2] */
    const float *bias;       /* [blocks * 32] */
    int64_t outputs;
    int64_t inputs; /* even, padded with zeros */
} Packed;

/* Return the best kind of instructions that this process may use. Linux permits tiles
 * only to processes that ask for them. */
int multiworld_best(void) {
    unsigned a, b, c, d;
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return NONE;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq"))
        return AVX2;
    if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || !(a >> 5 & 1))
        return AVX512;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 24 & 1) || !(d >> 22 & 1))
        return BF16;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) ? BF16 : AMX;
}

/* Two numbers of a row, as bits. */
static inline int32_t pair_of(const uint16_t *row, long at) {
    int32_t two;
    memcpy(&two, row + at, 4);
    return two;
}

/* ---- AVX-512 ---- */

#define FOR_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#define FOR_BF16                                                                       \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,avx512bf16")))

/* Round to the nearest bfloat16, half to even, as torch does. */
#define ROUNDED(name, target)                                                          \
    target static inline __m256i name(__m512 exact) {                                  \
        __m512i bits = _mm512_castps_si512(exact);                                     \
        __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16),                    \
                                       _mm512_set1_epi32(1));                          \
        __m512i up = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), odd);                 \
        __m512i found = _mm512_srli_epi32(_mm512_add_epi32(bits, up), 16);             \
        __mmask16 nan = _mm512_cmp_ps_mask(exact, exact, _CMP_UNORD_Q);                \
        found = _mm512_mask_mov_epi32(found, nan, _mm512_set1_epi32(0x7fc0));          \
        return _mm512_cvtepi32_epi16(found);                                           \
    }

#define STORED(name, target, rounded)                                                  \
    target static inline void name(__m512 sum, const float *bias, uint16_t *found,     \
                                   long width) {                                       \
        __mmask16 kept = width >= 16 ? 0xffff : width > 0 ? (1u << width) - 1 : 0;     \
        sum = _mm512_add_ps(sum, _mm512_loadu_ps(bias));                               \
        _mm256_mask_storeu_epi16(found, kept, rounded(sum));                           \
    }

ROUNDED(rounded_avx512, FOR_AVX512)
ROUNDED(rounded_bf16, FOR_BF16)
STORED(store_avx512, FOR_AVX512, rounded_avx512)
STORED(store_bf16, FOR_BF16, rounded_bf16)

/* Add the products of two inputs to the sums of 16 outputs. */
FOR_AVX512 static inline __m512 add_avx512(__m512 sum, __m512i weights, int32_t two) {
    const __m512i upper = _mm512_set1_epi32(0xffff0000);
    __m512i given = _mm512_set1_epi32(two);
    __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(weights, 16));
    __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(weights, upper));
    __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(given, 16));
    __m512 second = _mm512_castsi512_ps(_mm512_and_si512(given, upper));
    sum = _mm512_fmadd_ps(even, first, sum);
    return _mm512_fmadd_ps(odd, second, sum);
}

FOR_BF16 static inline __m512 add_bf16(__m512 sum, __m512i weights, int32_t two) {
    return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(two));
}

/* Multiply a block by ``count`` rows. */
#define ROWS(name, target, count, add, store)                                          \
    target static void name(const uint16_t *weights, const float *bias,                \
                            const uint16_t *rows, long inputs, uint16_t *found,        \
                            long outputs, long width) {                                \
        __m512 sums[count][2];                                                         \
        _Pragma("GCC unroll 12") for (int row = 0; row < count; row++)                 \
            sums[row][0] = sums[row][1] = _mm512_setzero_ps();                         \
        for (long at = 0; at < inputs; at += 2, weights += 2 * BLOCK) {                \
            __m512i first = _mm512_loadu_si512(weights);                               \
            __m512i second = _mm512_loadu_si512(weights + BLOCK);                      \
            _mm_prefetch((const char *)weights + AHEAD, _MM_HINT_T0);                  \
            _mm_prefetch((const char *)weights + AHEAD + 64, _MM_HINT_T0);             \
            _Pragma("GCC unroll 12") for (int row = 0; row < count; row++) {           \
                int32_t two = pair_of(rows + row * inputs, at);                        \
                sums[row][0] = add(sums[row][0], first, two);                          \
                sums[row][1] = add(sums[row][1], second, two);                         \
            }                                                                          \
        }                                                                              \
        _Pragma("GCC unroll 12") for (int row = 0; row < count; row++) {               \
            store(sums[row][0], bias, found + row * outputs, width);                   \
            store(sums[row][1], bias + 16, found + row * outputs + 16, width - 16);    \
        }                                                                              \
    }

#define ALL_ROWS(kind, target, add, store)                                             \
    ROWS(rows_##kind##_1, target, 1, add, store)                                       \
    ROWS(rows_##kind##_2, target, 2, add, store)                                       \
    ROWS(rows_##kind##_4, target, 4, add, store)                                       \
    ROWS(rows_##kind##_8, target, 8, add, store)                                       \
    ROWS(rows_##kind##_12, target, 12, add, store)                                     \
    static void multiply_##kind(const uint16_t *weights, const float *bias,            \
                                const uint16_t *rows, long count, long inputs,         \
                                uint16_t *found, long outputs, long width) {           \
        while (count) {                                                                \
            int some = count >= 12  ? 12                                               \
                       : count >= 8 ? 8                                                \
                       : count >= 4 ? 4                                                \
                       : count >= 2 ? 2                                                \
                                    : 1;                                               \
            (some == 12  ? rows_##kind##_12                                            \
             : some == 8 ? rows_##kind##_8                                             \
             : some == 4 ? rows_##kind##_4                                             \
             : some == 2 ? rows_##kind##_2                                             \
                         : rows_##kind##_1)(weights, bias, rows, inputs, found,        \
                                            outputs, width);                           \
            count -= some, rows += some * inputs, found += some * outputs;             \
        }                                                                              \
    }

ALL_ROWS(avx512, FOR_AVX512, add_avx512, store_avx512)
ALL_ROWS(bf16, FOR_BF16, add_bf16, store_bf16)

/* ---- AMX: tiles of 16 rows of 32 numbers ---- */

#define FOR_AMX                                                                        \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,avx512bf16,"         \
                          "amx-tile,amx-bf16")))

#define EIGHT(number) number, number, number, number, number, number, number, number

/* A constant, because GCC's ldtilecfg is said to read only eight bytes of it. */
static const struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} TILES = {.palette = 1, .bytes = {EIGHT(64)}, .rows = {EIGHT(16)}};

FOR_AMX static void begin_amx(void) { _tile_loadconfig(&TILES); }

FOR_AMX static void end_amx(void) { _tile_release(); }

/* Tiles 0 to 3 are sums, 4 and 5 rows, 6 and 7 weights. ``rows`` has room for full
 * tiles, and inputs are a multiple of 32. */
FOR_AMX static void multiply_amx(const uint16_t *weights, const float *bias,
                                 const uint16_t *rows, long count, long inputs,
                                 uint16_t *found, long outputs, long width) {
    float sums[32][BLOCK] __attribute__((aligned(64)));
    for (; count > 0; count -= 32) {
        const int has_second = count > 16;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (long at = 0; at < inputs; at += 32) {
            _tile_loadd(6, weights + at * BLOCK, 4 * BLOCK);
            _tile_loadd(7, weights + at * BLOCK + BLOCK, 4 * BLOCK);
            _tile_loadd(4, rows + at, 2 * inputs);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (has_second) {
                _tile_loadd(5, rows + 16 * inputs + at, 2 * inputs);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, sums[0], sizeof(sums[0]));
        _tile_stored(1, sums[0] + 16, sizeof(sums[0]));
        if (has_second) {
            _tile_stored(2, sums[16], sizeof(sums[0]));
            _tile_stored(3, sums[16] + 16, sizeof(sums[0]));
        }
        for (int row = 0; row < 32 && row < count; row++)
            for (int at = 0; at < BLOCK; at += 16)
                store_bf16(_mm512_load_ps(sums[row] + at), bias + at,
                           found + row * outputs + at, width - at);
        rows += 32 * inputs, found += 32 * outputs;
    }
}

/* ---- AVX2 ---- */

#define FOR_AVX2 __attribute__((target("avx2,fma")))

static inline uint16_t rounded_avx2(float exact) {
    uint32_t bits;
    memcpy(&bits, &exact, 4);
    if (exact != exact)
        return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#define ROWS_AVX2(name, count)                                                         \
    FOR_AVX2 static void name(const uint16_t *weights, const float *bias,              \
                              const uint16_t *rows, long inputs, uint16_t *found,      \
                              long outputs, long width) {                              \
        const __m256i upper = _mm256_set1_epi32(0xffff0000);                           \
        for (int half = 0; half < BLOCK && half < width; half += 16) {                 \
            const uint16_t *from = weights + 2 * half;                                 \
            __m256 sums[count][2];                                                     \
            for (int row = 0; row < count; row++)                                      \
                sums[row][0] = sums[row][1] = _mm256_setzero_ps();                     \
            for (long at = 0; at < inputs; at += 2, from += 2 * BLOCK) {               \
                __m256i first = _mm256_loadu_si256((const __m256i *)from);             \
                __m256i second = _mm256_loadu_si256((const __m256i *)(from + 16));     \
                __m256 even0 = _mm256_castsi256_ps(_mm256_slli_epi32(first, 16));      \
                __m256 odd0 = _mm256_castsi256_ps(_mm256_and_si256(first, upper));     \
                __m256 even1 = _mm256_castsi256_ps(_mm256_slli_epi32(second, 16));     \
                __m256 odd1 = _mm256_castsi256_ps(_mm256_and_si256(second, upper));    \
                _mm_prefetch((const char *)from + AHEAD, _MM_HINT_T0);                 \
                _Pragma("GCC unroll 4") for (int row = 0; row < count; row++) {        \
                    __m256i two = _mm256_set1_epi32(pair_of(rows + row * inputs, at)); \
                    __m256 one = _mm256_castsi256_ps(_mm256_slli_epi32(two, 16));      \
                    __m256 other = _mm256_castsi256_ps(_mm256_and_si256(two, upper));  \
                    sums[row][0] = _mm256_fmadd_ps(even0, one, sums[row][0]);          \
                    sums[row][1] = _mm256_fmadd_ps(even1, one, sums[row][1]);          \
                    sums[row][0] = _mm256_fmadd_ps(odd0, other, sums[row][0]);         \
                    sums[row][1] = _mm256_fmadd_ps(odd1, other, sums[row][1]);         \
                }                                                                      \
            }                                                                          \
            for (int row = 0; row < count; row++) {                                    \
                float exact[16];                                                       \
                _mm256_storeu_ps(exact, sums[row][0]);                                 \
                _mm256_storeu_ps(exact + 8, sums[row][1]);                             \
                for (int at = 0; at < 16 && half + at < width; at++)                   \
                    found[row * outputs + half + at] =                                 \
                        rounded_avx2(exact[at] + bias[half + at]);                     \
            }                                                                          \
        }                                                                              \
    }

ROWS_AVX2(rows_avx2_1, 1)
ROWS_AVX2(rows_avx2_4, 4)

static void multiply_avx2(const uint16_t *weights, const float *bias,
                          const uint16_t *rows, long count, long inputs,
                          uint16_t *found, long outputs, long width) {
    while (count) {
        int some = count >= 4 ? 4 : 1;
        (some == 4 ? rows_avx2_4 : rows_avx2_1)(weights, bias, rows, inputs, found,
                                                outputs, width);
        count -= some, rows += some * inputs, found += some * outputs;
    }
}

/* Multiply rows, [count, inputs], by packed weights, to [count, outputs]. For tiles,
 * ``rows`` has room for a multiple of 32 rows. ``kind`` is at most
 * ``multiworld_best()``. */
void multiworld_multiply(const Packed *packed, const uint16_t *rows, long count,
                         uint16_t *found, int threads, int kind) {
    long inputs = packed->inputs, outputs = packed->outputs;
    long blocks = (outputs + BLOCK - 1) / BLOCK;
    if (kind == AMX && (count < FEW || inputs % 32))
        kind = BF16;
#pragma omp parallel num_threads(threads)
    {
        if (kind == AMX)
            begin_amx();
#pragma omp for schedule(static)
        for (long block = 0; block < blocks; block++) {
            long begin = block * BLOCK;
            (kind == AVX2     ? multiply_avx2
             : kind == AVX512 ? multiply_avx512
             : kind == BF16   ? multiply_bf16
                              : multiply_amx)(
                packed->weights + begin * inputs, packed->bias + begin, rows, count,
                inputs, found + begin, outputs, outputs - begin);
        }
        if (kind == AMX)
            end_amx();
    }
}

#else

int multiworld_best(void) { return 0; }

#endif
