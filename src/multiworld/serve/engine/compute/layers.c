/* Decoder layers without their matmuls: attention, norms, rotary embeddings and gates,
 * for x86 with AVX2 and FMA. A row has the same bits in every call. Numbers in memory
 * are float32 or bfloat16; all arithmetic is in float32, and results are rounded once.
 *
 * A row attends to the keys of its sequence in pieces of 32, from the first key on,
 * with an online softmax. The order of all additions depends only on the position of
 * the row, and not on other rows, the number of threads or the processor.
 *
 * Compile with -ffp-contract=off, so that every operation on floats is rounded.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>

#define FOR_AVX2 __attribute__((target("avx2,fma")))
/* Inlined into callers in which ``bf16`` is a constant. */
#define INLINE FOR_AVX2 static inline __attribute__((always_inline))
#define LANES 8
#define PIECE 32 /* keys */
#define PARTS (PIECE / LANES)
#define ROWS 48      /* maximum in a task; they share the columns of a piece */
#define TOGETHER 3   /* rows whose scores are computed at once */
#define MAX_SIZE 256 /* of a head; a multiple of 8 */

typedef struct {
    int64_t heads, key_heads, size, value_size;
    /* Strides: from a head to the next, and from a row to the next. */
    int64_t query_head, key_head, value_head, query_row, key_row, value_row;
    int64_t window; /* keys that a row attends to; 0: all */
    int64_t bf16;   /* whether numbers are bfloat16 */
    float scale;
} Form;

/* Rows of a sequence, and its memory: keys and values, [key heads, tokens, size]. */
typedef struct {
    void *keys, *values;
    int64_t tokens, begin, count, offset;
} Rows;

int multiworld_can_run(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

INLINE long width_of(const int bf16) { return bf16 ? sizeof(uint16_t) : sizeof(float); }

INLINE const void *after(const void *from, long count, const int bf16) {
    return (const char *)from + count * width_of(bf16);
}

/* Return eight numbers, starting with number ``at``. */
INLINE __m256 get(const void *from, long at, const int bf16) {
    if (!bf16)
        return _mm256_loadu_ps((const float *)from + at);
    __m128i bits = _mm_loadu_si128((const __m128i *)((const uint16_t *)from + at));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

INLINE float get_one(const void *from, long at, const int bf16) {
    if (!bf16)
        return ((const float *)from)[at];
    const uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
    float found;
    memcpy(&found, &bits, sizeof found);
    return found;
}

/* Write eight numbers; to bfloat16 they are rounded to nearest, ties to even. */
INLINE void put(void *to, long at, __m256 x, const int bf16) {
    if (!bf16) {
        _mm256_storeu_ps((float *)to + at, x);
        return;
    }
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd =
        _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i more = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    __m256i near = _mm256_add_epi32(bits, more);
    near = _mm256_blendv_epi8(near, _mm256_set1_epi32(0x7fc00000), is_nan);
    near = _mm256_srli_epi32(near, 16);
    _mm_storeu_si128((__m128i *)((uint16_t *)to + at),
                     _mm_packus_epi32(_mm256_castsi256_si128(near),
                                      _mm256_extracti128_si256(near, 1)));
}

/* e^x for x <= 0, to about one unit in the last place; 0 below -87.
 * Cody and Waite's reduction; the polynomial is that of Cephes' expf. */
FOR_AVX2 static inline __m256 exponential(__m256 x) {
    const __m256 is_tiny = _mm256_cmp_ps(x, _mm256_set1_ps(-87.0f), _CMP_LT_OQ);
    __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504088896341f)),
                               _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 y = _mm256_set1_ps(1.9875691500e-4f);
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.3981999507e-3f));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(8.3334519073e-3f));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(4.1665795894e-2f));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.6666665459e-1f));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(5.0000001201e-1f));
    y = _mm256_fmadd_ps(y, _mm256_mul_ps(r, r), r);
    y = _mm256_add_ps(y, _mm256_set1_ps(1.0f));
    __m256i power = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    y = _mm256_mul_ps(y, _mm256_castsi256_ps(_mm256_slli_epi32(power, 23)));
    return _mm256_andnot_ps(is_tiny, y);
}

FOR_AVX2 static inline float largest(__m256 x) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    m = _mm_max_ss(m, _mm_shuffle_ps(m, m, 1));
    return _mm_cvtss_f32(m);
}

FOR_AVX2 static inline float sum(__m256 x) {
    __m128 m = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    m = _mm_add_ps(m, _mm_movehl_ps(m, m));
    m = _mm_add_ss(m, _mm_shuffle_ps(m, m, 1));
    return _mm_cvtss_f32(m);
}

/* Write eight keys, starting with ``key``, as columns of [size, PIECE]. */
INLINE void turn(const void *key, long size, float *columns, const int bf16) {
    for (long at = 0; at < size; at += 8) {
        __m256 a[8], b[8];
        for (int i = 0; i < 8; i++)
            a[i] = get(key, i * size + at, bf16);
        for (int i = 0; i < 8; i += 2) {
            b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
            b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
        }
        for (int i = 0; i < 8; i += 4) {
            a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
            a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
            a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
            a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
        }
        for (int i = 0; i < 4; i++) {
            float *low = columns + (at + i) * PIECE, *high = low + 4 * PIECE;
            _mm256_store_ps(low, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
            _mm256_store_ps(high, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
        }
    }
}

/* Compute the scores of ``count`` rows with the keys of a piece. */
#define SCORES(name, count)                                                            \
    FOR_AVX2 static void name(const float *const *rows, const float *columns,          \
                              long size, float scale, float (*scores)[PIECE]) {        \
        __m256 sums[count][PARTS];                                                     \
        _Pragma("GCC unroll 3") for (int row = 0; row < count; row++)                  \
            _Pragma("GCC unroll 4") for (int part = 0; part < PARTS; part++)           \
                sums[row][part] = _mm256_setzero_ps();                                 \
        for (long at = 0; at < size; at++, columns += PIECE)                           \
            _Pragma("GCC unroll 3") for (int row = 0; row < count; row++) {            \
                __m256 here = _mm256_broadcast_ss(rows[row] + at);                     \
                _Pragma("GCC unroll 4") for (int part = 0; part < PARTS; part++)       \
                    sums[row][part] = _mm256_fmadd_ps(                                 \
                        here, _mm256_load_ps(columns + LANES * part),                  \
                        sums[row][part]);                                              \
            }                                                                          \
        const __m256 scales = _mm256_set1_ps(scale);                                   \
        for (int row = 0; row < count; row++)                                          \
            for (int part = 0; part < PARTS; part++)                                   \
                _mm256_store_ps(scores[row] + LANES * part,                            \
                                _mm256_mul_ps(sums[row][part], scales));               \
    }

SCORES(scores_1, 1)
SCORES(scores_2, 2)
SCORES(scores_3, 3)

/* State of a row's online softmax after some pieces. */
typedef struct {
    float values[MAX_SIZE] __attribute__((aligned(32)));
    __m256 weight;
    float largest;
    long first, end; /* range of keys that the row attends to */
} State;

INLINE void add_values(State *state, const float *weights, float less,
                       const void *values, long size, long from, long to,
                       const int bf16) {
    for (long at = 0; at < size; at += 8 * LANES) {
        const int parts = size - at < 8 * LANES ? (int)((size - at) / LANES) : 8;
        if (parts == 8) {
            __m256 found[8];
            _Pragma("GCC unroll 8") for (int part = 0; part < 8; part++) found[part] =
                _mm256_mul_ps(_mm256_load_ps(state->values + at + LANES * part),
                              _mm256_set1_ps(less));
            for (long key = from; key < to; key++) {
                __m256 weight = _mm256_broadcast_ss(weights + key);
                const long first = key * size + at;
                _Pragma("GCC unroll 8") for (int part = 0; part < 8; part++)
                    found[part] = _mm256_fmadd_ps(
                        weight, get(values, first + LANES * part, bf16), found[part]);
            }
            _Pragma("GCC unroll 8") for (int part = 0; part < 8; part++)
                _mm256_store_ps(state->values + at + LANES * part, found[part]);
        } else
            for (int part = 0; part < parts; part++) {
                const long first = at + LANES * part;
                float *target = state->values + first;
                __m256 found = _mm256_mul_ps(_mm256_load_ps(target),
                                             _mm256_set1_ps(less));
                for (long key = from; key < to; key++)
                    found = _mm256_fmadd_ps(_mm256_broadcast_ss(weights + key),
                                            get(values, key * size + first, bf16),
                                            found);
                _mm256_store_ps(target, found);
            }
    }
}

/* Add a piece, which starts at key ``begin``, to the state of a row. */
INLINE void attend_piece(State *state, float *scores, long begin, const void *values,
                         long size, const int bf16) {
    const long from = state->first > begin ? state->first - begin : 0;
    const long to = state->end - begin < PIECE ? state->end - begin : PIECE;
    if (from >= to)
        return;
    for (long key = 0; key < from; key++)
        scores[key] = -__builtin_inff();
    for (long key = to; key < PIECE; key++)
        scores[key] = -__builtin_inff();
    __m256 most = _mm256_load_ps(scores);
    for (int part = 1; part < PARTS; part++)
        most = _mm256_max_ps(most, _mm256_load_ps(scores + LANES * part));
    float found = largest(most), before = state->largest;
    state->largest = found > before ? found : before;
    if (state->largest == -__builtin_inff())
        return; /* these keys have no weight */
    const __m256 shift = _mm256_set1_ps(state->largest);
    const float less =
        _mm256_cvtss_f32(exponential(_mm256_sub_ps(_mm256_set1_ps(before), shift)));
    __m256 weight = _mm256_mul_ps(state->weight, _mm256_set1_ps(less));
    for (int part = 0; part < PARTS; part++) {
        float *here = scores + LANES * part;
        __m256 more = exponential(_mm256_sub_ps(_mm256_load_ps(here), shift));
        _mm256_store_ps(here, more);
        weight = _mm256_add_ps(weight, more);
    }
    state->weight = weight;
    add_values(state, scores, less, values, size, from, to, bf16);
}

/* Prefetch bytes into the cache; addresses past the end of memory are allowed. */
INLINE void prefetch(const void *from, long count) {
    for (long at = 0; at < count; at += 64)
        _mm_prefetch((const char *)from + at, _MM_HINT_T1);
}

/* Compute the attention of the rows ``from`` to ``to`` (exclusive) of one key head.
 * Each token of the sequence has one row for each query head that uses the key head. */
INLINE void attend_task(const Form *form, const Rows *rows, const void *query,
                        long key_head, long from, long to, void *found,
                        const int bf16) {
    float widened[bf16 ? ROWS : 1][MAX_SIZE]; /* queries */
    float columns[MAX_SIZE * PIECE] __attribute__((aligned(32)));
    float scores[TOGETHER][PIECE] __attribute__((aligned(32)));
    State states[ROWS];
    const float *queries[ROWS];
    const long group = form->heads / form->key_heads, size = form->size;
    const long value_size = form->value_size;
    const void *keys = after(rows->keys, key_head * rows->tokens * size, bf16);
    const void *values =
        after(rows->values, key_head * rows->tokens * value_size, bf16);
    long first = rows->tokens, end = 0;
    const int count = (int)(to - from);
    for (int number = 0; number < count; number++) {
        const long row = (from + number) / group;
        const long head = key_head * group + (from + number) % group;
        State *state = states + number;
        const void *given = after(
            query, head * form->query_head + (rows->offset + row) * form->query_row,
            bf16);
        queries[number] = given;
        if (bf16) {
            for (long at = 0; at < size; at += LANES)
                put(widened[number], at, get(given, at, 1), 0);
            queries[number] = widened[number];
        }
        memset(state->values, 0, value_size * sizeof(float));
        state->weight = _mm256_setzero_ps();
        state->largest = -__builtin_inff();
        state->end = rows->begin + row + 1;
        const int is_cut = form->window && state->end > form->window;
        state->first = is_cut ? state->end - form->window : 0;
        first = state->first < first ? state->first : first;
        end = state->end > end ? state->end : end;
    }
    for (long begin = first / PIECE * PIECE; begin < end; begin += PIECE) {
        const void *here = after(keys, begin * size, bf16);
        const void *those = after(values, begin * value_size, bf16);
        const long bytes = PIECE * width_of(bf16);
        prefetch((const char *)here + bytes * size, bytes * size);
        prefetch((const char *)those + bytes * value_size, bytes * value_size);
        if (begin + PIECE <= rows->tokens)
            for (int part = 0; part < PARTS; part++)
                turn(after(here, part * LANES * size, bf16), size,
                     columns + part * LANES, bf16);
        else /* memory ends: lanes without a key are masked */
            for (long key = 0; key < PIECE; key++)
                for (long at = 0; at < size; at++)
                    columns[at * PIECE + key] =
                        begin + key < rows->tokens ? get_one(here, key * size + at, bf16)
                                                   : 0.0f;
        for (int number = 0; number < count; number += TOGETHER) {
            const int now = count - number < TOGETHER ? count - number : TOGETHER;
            (now == 3 ? scores_3 : now == 2 ? scores_2 : scores_1)(
                queries + number, columns, size, form->scale, scores);
            for (int one = 0; one < now; one++)
                attend_piece(states + number + one, scores[one], begin, those,
                             value_size, bf16);
        }
    }
    for (int number = 0; number < count; number++) {
        const long row = (from + number) / group;
        const long head = key_head * group + (from + number) % group;
        State *state = states + number;
        const long first = ((rows->offset + row) * form->heads + head) * value_size;
        __m256 weight = _mm256_set1_ps(sum(state->weight));
        for (long at = 0; at < value_size; at += LANES)
            put(found, first + at,
                _mm256_div_ps(_mm256_load_ps(state->values + at), weight), bf16);
    }
}

typedef void Task(const Form *form, const Rows *rows, const void *query, long key_head,
                  long from, long to, void *found);

FOR_AVX2 static void attend_float32(const Form *form, const Rows *rows,
                                    const void *query, long key_head, long from,
                                    long to, void *found) {
    attend_task(form, rows, query, key_head, from, to, found, 0);
}

FOR_AVX2 static void attend_bfloat16(const Form *form, const Rows *rows,
                                     const void *query, long key_head, long from,
                                     long to, void *found) {
    attend_task(form, rows, query, key_head, from, to, found, 1);
}

/* Append keys and values of rows, [key heads, rows, size], to the memory of their
 * sequences, and compute the attention of queries, [heads, rows, size]. ``found`` gets
 * the results, [rows, heads, size of values]. */
void multiworld_attend(const Form *form, const void *query, const void *key,
                       const void *value, const Rows *rows, long sequences, void *found,
                       int threads) {
    Task *const attend = form->bf16 ? attend_bfloat16 : attend_float32;
    const long bytes = form->bf16 ? sizeof(uint16_t) : sizeof(float);
    const long group = form->heads / form->key_heads, heads = form->key_heads;
    long tasks = 0, all_rows = 0;
    for (long number = 0; number < sequences; number++)
        all_rows += heads * rows[number].count * group;
    /* Make tasks smaller if some threads would have none. */
    const long share = all_rows / (4 * threads) / TOGETHER * TOGETHER;
    const long most = share < TOGETHER ? TOGETHER : share < ROWS ? share : ROWS;
    for (long number = 0; number < sequences; number++)
        tasks += heads * ((rows[number].count * group + most - 1) / most);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static) collapse(2)
        for (long number = 0; number < sequences; number++)
            for (long head = 0; head < heads; head++) {
                const Rows *here = rows + number;
                for (long row = 0; row < here->count; row++) {
                    long at = head * here->tokens + here->begin + row;
                    long from = here->offset + row;
                    memcpy((char *)here->keys + at * form->size * bytes,
                           (const char *)key + (head * form->key_head +
                                                from * form->key_row) * bytes,
                           form->size * bytes);
                    memcpy((char *)here->values + at * form->value_size * bytes,
                           (const char *)value + (head * form->value_head +
                                                  from * form->value_row) * bytes,
                           form->value_size * bytes);
                }
            }
#pragma omp for schedule(dynamic)
        for (long task = 0; task < tasks; task++) {
            long number = 0, rest = task, blocks;
            for (;; number++) {
                blocks = (rows[number].count * group + most - 1) / most;
                if (rest < heads * blocks)
                    break;
                rest -= heads * blocks;
            }
            long head = rest / blocks, from = rest % blocks * most;
            long to = from + most, all = rows[number].count * group;
            attend(form, rows + number, query, head, from, to < all ? to : all, found);
        }
    }
}

#define ALONE 16384 /* numbers up to which one thread is faster than several */

/* Write x / sqrt(mean of squares + epsilon) times the weight; ``width`` is a multiple
 * of 8. The squares are added in 32 lanes. */
INLINE void normalize(const void *x, const void *weight, float epsilon, long width,
                      void *found, const int bf16) {
    __m256 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(),
                      _mm256_setzero_ps()};
    long at = 0;
    for (; at + 4 * LANES <= width; at += 4 * LANES)
        for (int part = 0; part < 4; part++) {
            __m256 here = get(x, at + part * LANES, bf16);
            sums[part] = _mm256_fmadd_ps(here, here, sums[part]);
        }
    for (; at < width; at += LANES) {
        __m256 here = get(x, at, bf16);
        sums[0] = _mm256_fmadd_ps(here, here, sums[0]);
    }
    __m256 all = _mm256_add_ps(_mm256_add_ps(sums[0], sums[1]),
                               _mm256_add_ps(sums[2], sums[3]));
    const __m256 factor =
        _mm256_set1_ps(1.0f / sqrtf(sum(all) / (float)width + epsilon));
    for (at = 0; at < width; at += LANES) {
        __m256 here = _mm256_mul_ps(get(x, at, bf16), factor);
        put(found, at, _mm256_mul_ps(here, get(weight, at, bf16)), bf16);
    }
}

INLINE void norm_row(const void *x, const void *more, void *both, const void *weight,
                     float epsilon, long first, long width, void *found,
                     const int bf16) {
    const void *here = after(x, first, bf16);
    if (more) {
        for (long at = first; at < first + width; at += LANES)
            put(both, at, _mm256_add_ps(get(x, at, bf16), get(more, at, bf16)), bf16);
        here = after(both, first, bf16);
    }
    normalize(here, weight, epsilon, width, (char *)found + first * width_of(bf16),
              bf16);
}

/* Write the norms of the rows of x, [rows, width]. With ``more``, write x + more to
 * ``both``, and the norms of that sum. */
FOR_AVX2 void multiworld_norm(const void *x, const void *more, void *both,
                              const void *weight, float epsilon, long rows, long width,
                              void *found, int threads, int bf16) {
#pragma omp parallel for num_threads(threads) if (rows * width > ALONE)
    for (long row = 0; row < rows; row++)
        if (bf16)
            norm_row(x, more, both, weight, epsilon, row * width, width, found, 1);
        else
            norm_row(x, more, both, weight, epsilon, row * width, width, found, 0);
}

/* Rotate heads, [heads, size], by the angles of a row; ``size`` is a multiple of 16.
 * With a weight, each head is normalized first. */
INLINE void rotate(void *heads, long count, long size, const void *cosines,
                   const void *sines, const void *weight, float epsilon,
                   const int bf16) {
    const long half = size / 2;
    for (long number = 0; number < count; number++) {
        void *head = (char *)heads + number * size * width_of(bf16);
        if (weight)
            normalize(head, weight, epsilon, size, head, bf16);
        for (long low = 0, high = half; low < half; low += LANES, high += LANES) {
            __m256 a = get(head, low, bf16), b = get(head, high, bf16);
            __m256 turned = _mm256_mul_ps(b, get(sines, low, bf16));
            __m256 kept = _mm256_mul_ps(a, get(cosines, low, bf16));
            put(head, low, _mm256_sub_ps(kept, turned), bf16);
            turned = _mm256_mul_ps(a, get(sines, high, bf16));
            kept = _mm256_mul_ps(b, get(cosines, high, bf16));
            put(head, high, _mm256_add_ps(kept, turned), bf16);
        }
    }
}

INLINE void rotate_row(void *query, void *key, const void *cosines, const void *sines,
                       const void *query_weight, const void *key_weight, float epsilon,
                       long row, long heads, long key_heads, long size,
                       const int bf16) {
    const long bytes = row * size * width_of(bf16);
    const void *c = (const char *)cosines + bytes, *s = (const char *)sines + bytes;
    rotate((char *)query + heads * bytes, heads, size, c, s, query_weight, epsilon,
           bf16);
    rotate((char *)key + key_heads * bytes, key_heads, size, c, s, key_weight, epsilon,
           bf16);
}

/* Rotate queries, [rows, heads, size], and keys, in place. */
FOR_AVX2 void multiworld_rotate(void *query, void *key, const void *cosines,
                                const void *sines, const void *query_weight,
                                const void *key_weight, float epsilon, long rows,
                                long heads, long key_heads, long size, int threads,
                                int bf16) {
#pragma omp parallel for num_threads(threads) if (rows * heads * size > ALONE)
    for (long row = 0; row < rows; row++)
        if (bf16)
            rotate_row(query, key, cosines, sines, query_weight, key_weight, epsilon,
                       row, heads, key_heads, size, 1);
        else
            rotate_row(query, key, cosines, sines, query_weight, key_weight, epsilon,
                       row, heads, key_heads, size, 0);
}

/* gate / (1 + e^-gate) * up */
INLINE void gate_lanes(void *gate, const void *up, long at, const int bf16) {
    const __m256 one = _mm256_set1_ps(1.0f), sign = _mm256_set1_ps(-0.0f);
    const __m256 x = get(gate, at, bf16);
    const __m256 power = exponential(_mm256_or_ps(x, sign)); /* e^-|x| */
    /* e^-|x| if x is negative, otherwise one. */
    const __m256 above = _mm256_blendv_ps(one, power, x);
    const __m256 share = _mm256_div_ps(above, _mm256_add_ps(one, power));
    put(gate, at, _mm256_mul_ps(_mm256_mul_ps(x, share), get(up, at, bf16)), bf16);
}

/* gate = gate / (1 + e^-gate) * up, for ``count`` numbers, a multiple of 8. */
FOR_AVX2 void multiworld_gate(void *gate, const void *up, long count, int threads,
                              int bf16) {
#pragma omp parallel for num_threads(threads) if (count > ALONE)
    for (long at = 0; at < count; at += LANES)
        if (bf16)
            gate_lanes(gate, up, at, 1);
        else
            gate_lanes(gate, up, at, 0);
}
#endif
