/* Layers of decoders without their products, in float32: attention, norms, rotations
 * and gates, for x86 with AVX2 and FMA. A row has the same bits in every call.
 *
 * A row attends to the keys of its sequence in pieces of 32, which begin at the first
 * key, with an online softmax. What is added in which order follows from the row's
 * position alone: not from other rows, the number of threads, or the processor.
 *
 * Compile with -ffp-contract=off: every operation on floats is rounded.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>

#define FOR_AVX2 __attribute__((target("avx2,fma")))
#define LANES 8
#define PIECE 32 /* keys */
#define PARTS (PIECE / LANES)
#define ROWS 48      /* of a task, at most; all of them use a piece of columns */
#define TOGETHER 3   /* rows whose scores are computed at once */
#define MAX_SIZE 256 /* of a head; a multiple of 8 */

typedef struct {
    int64_t heads, key_heads, size, value_size;
    /* Strides: from a head to the next, and from a row to the next. */
    int64_t query_head, key_head, value_head, query_row, key_row, value_row;
    int64_t window; /* keys that a row attends to; 0: all */
    float scale;
} Form;

/* Rows of a sequence, and its memory: keys and values, [key heads, tokens, size]. */
typedef struct {
    float *keys, *values;
    int64_t tokens, begin, count, offset;
} Rows;

int multiworld_can_run(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
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

/* Write eight keys, from ``key`` on, as columns of [size, PIECE]. */
FOR_AVX2 static inline void turn(const float *key, long size, float *columns) {
    for (long at = 0; at < size; at += 8) {
        __m256 a[8], b[8];
        for (int i = 0; i < 8; i++)
            a[i] = _mm256_loadu_ps(key + i * size + at);
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

/* Scores of ``count`` rows with a piece. */
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

/* What a row has found in the pieces before. */
typedef struct {
    float values[MAX_SIZE] __attribute__((aligned(32)));
    __m256 weight;
    float largest;
    long first, end; /* keys that it attends to */
} State;

FOR_AVX2 static void add_values(State *state, const float *weights, float less,
                                const float *values, long size, long from, long to) {
    for (long at = 0; at < size; at += 8 * LANES) {
        const int parts = size - at < 8 * LANES ? (int)((size - at) / LANES) : 8;
        if (parts == 8) {
            __m256 found[8];
            _Pragma("GCC unroll 8") for (int part = 0; part < 8; part++) found[part] =
                _mm256_mul_ps(_mm256_load_ps(state->values + at + LANES * part),
                              _mm256_set1_ps(less));
            for (long key = from; key < to; key++) {
                __m256 weight = _mm256_broadcast_ss(weights + key);
                const float *value = values + key * size + at;
                _Pragma("GCC unroll 8") for (int part = 0; part < 8; part++)
                    found[part] = _mm256_fmadd_ps(
                        weight, _mm256_loadu_ps(value + LANES * part), found[part]);
            }
            _Pragma("GCC unroll 8") for (int part = 0; part < 8; part++)
                _mm256_store_ps(state->values + at + LANES * part, found[part]);
        } else
            for (int part = 0; part < parts; part++) {
                float *target = state->values + at + LANES * part;
                const float *value = values + at + LANES * part;
                __m256 found = _mm256_mul_ps(_mm256_load_ps(target),
                                             _mm256_set1_ps(less));
                for (long key = from; key < to; key++)
                    found = _mm256_fmadd_ps(_mm256_broadcast_ss(weights + key),
                                            _mm256_loadu_ps(value + key * size), found);
                _mm256_store_ps(target, found);
            }
    }
}

/* Attend to the keys of a piece, which begins at ``begin``. */
FOR_AVX2 static void attend_piece(State *state, float *scores, long begin,
                                  const float *values, long size) {
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
    add_values(state, scores, less, values, size, from, to);
}

/* Ask memory for numbers that are needed soon; they need not exist. */
FOR_AVX2 static inline void prefetch(const float *from, long count) {
    for (long at = 0; at < count; at += 16)
        _mm_prefetch(from + at, _MM_HINT_T1);
}

/* Attend with some rows of one key head, of which each has as many as there are heads in
 * a group: those from ``from`` to ``to``. */
FOR_AVX2 static void attend_task(const Form *form, const Rows *rows, const float *query,
                                 long key_head, long from, long to, float *found) {
    float columns[MAX_SIZE * PIECE] __attribute__((aligned(32)));
    float scores[TOGETHER][PIECE] __attribute__((aligned(32)));
    State states[ROWS];
    const float *queries[ROWS];
    const long group = form->heads / form->key_heads, size = form->size;
    const long value_size = form->value_size;
    const float *keys = rows->keys + key_head * rows->tokens * size;
    const float *values = rows->values + key_head * rows->tokens * value_size;
    long first = rows->tokens, end = 0;
    const int count = (int)(to - from);
    for (int number = 0; number < count; number++) {
        const long row = (from + number) / group;
        const long head = key_head * group + (from + number) % group;
        State *state = states + number;
        queries[number] = query + head * form->query_head +
                          (rows->offset + row) * form->query_row;
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
        const float *here = keys + begin * size;
        prefetch(here + PIECE * size, PIECE * size);
        prefetch(values + (begin + PIECE) * value_size, PIECE * value_size);
        if (begin + PIECE <= rows->tokens)
            for (int part = 0; part < PARTS; part++)
                turn(here + part * LANES * size, size, columns + part * LANES);
        else /* memory ends: lanes of no key are not looked at */
            for (long key = 0; key < PIECE; key++)
                for (long at = 0; at < size; at++)
                    columns[at * PIECE + key] =
                        begin + key < rows->tokens ? here[key * size + at] : 0.0f;
        for (int number = 0; number < count; number += TOGETHER) {
            const int now = count - number < TOGETHER ? count - number : TOGETHER;
            (now == 3 ? scores_3 : now == 2 ? scores_2 : scores_1)(
                queries + number, columns, size, form->scale, scores);
            for (int one = 0; one < now; one++)
                attend_piece(states + number + one, scores[one], begin,
                             values + begin * value_size, value_size);
        }
    }
    for (int number = 0; number < count; number++) {
        const long row = (from + number) / group;
        const long head = key_head * group + (from + number) % group;
        State *state = states + number;
        float *target =
            found + ((rows->offset + row) * form->heads + head) * value_size;
        __m256 weight = _mm256_set1_ps(sum(state->weight));
        for (long at = 0; at < value_size; at += LANES)
            _mm256_storeu_ps(target + at,
                             _mm256_div_ps(_mm256_load_ps(state->values + at), weight));
    }
}

/* Append keys and values of rows, [key heads, rows, size], to the memory of their
 * sequences, and attend with queries, [heads, rows, size]. ``found`` gets the results,
 * [rows, heads, size of values]. */
void multiworld_attend(const Form *form, const float *query, const float *key,
                       const float *value, const Rows *rows, long sequences,
                       float *found, int threads) {
    const long group = form->heads / form->key_heads, heads = form->key_heads;
    long tasks = 0, all_rows = 0;
    for (long number = 0; number < sequences; number++)
        all_rows += heads * rows[number].count * group;
    /* Fewer rows for each task where some threads would have none. */
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
                    memcpy(here->keys + at * form->size,
                           key + head * form->key_head + from * form->key_row,
                           form->size * sizeof(float));
                    memcpy(here->values + at * form->value_size,
                           value + head * form->value_head + from * form->value_row,
                           form->value_size * sizeof(float));
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
            attend_task(form, rows + number, query, head, from,
                        to < all ? to : all, found);
        }
    }
}

#define ALONE 16384 /* numbers up to which one thread takes less time than several */

/* x / sqrt(mean of squares + epsilon), times the weight; ``width`` is a multiple of 8.
 * The squares are added in 32 lanes. */
FOR_AVX2 static void normalize(const float *x, const float *weight, float epsilon,
                               long width, float *found) {
    __m256 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(),
                      _mm256_setzero_ps()};
    long at = 0;
    for (; at + 4 * LANES <= width; at += 4 * LANES)
        for (int part = 0; part < 4; part++) {
            __m256 here = _mm256_loadu_ps(x + at + part * LANES);
            sums[part] = _mm256_fmadd_ps(here, here, sums[part]);
        }
    for (; at < width; at += LANES) {
        __m256 here = _mm256_loadu_ps(x + at);
        sums[0] = _mm256_fmadd_ps(here, here, sums[0]);
    }
    __m256 all = _mm256_add_ps(_mm256_add_ps(sums[0], sums[1]),
                               _mm256_add_ps(sums[2], sums[3]));
    const __m256 factor =
        _mm256_set1_ps(1.0f / sqrtf(sum(all) / (float)width + epsilon));
    for (at = 0; at < width; at += LANES) {
        __m256 here = _mm256_mul_ps(_mm256_loadu_ps(x + at), factor);
        _mm256_storeu_ps(found + at, _mm256_mul_ps(here, _mm256_loadu_ps(weight + at)));
    }
}

/* Write the norms of rows, [rows, width]; with ``more``, of ``both = x + more``. */
FOR_AVX2 void multiworld_norm(const float *x, const float *more, float *both,
                              const float *weight, float epsilon, long rows, long width,
                              float *found, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * width > ALONE)
    for (long row = 0; row < rows; row++) {
        const float *here = x + row * width;
        if (more) {
            for (long at = row * width; at < (row + 1) * width; at += LANES)
                _mm256_storeu_ps(both + at, _mm256_add_ps(_mm256_loadu_ps(x + at),
                                                          _mm256_loadu_ps(more + at)));
            here = both + row * width;
        }
        normalize(here, weight, epsilon, width, found + row * width);
    }
}

/* Rotate heads, [heads, size], by the angles of a row; ``size`` is a multiple of 16.
 * With a weight, each head is normalized before. */
FOR_AVX2 static void rotate(float *heads, long count, long size, const float *cosines,
                            const float *sines, const float *weight, float epsilon) {
    const long half = size / 2;
    for (float *head = heads; head < heads + count * size; head += size) {
        if (weight)
            normalize(head, weight, epsilon, size, head);
        for (long at = 0; at < half; at += LANES) {
            float *low = head + at, *high = low + half;
            __m256 a = _mm256_loadu_ps(low), b = _mm256_loadu_ps(high);
            __m256 turned = _mm256_mul_ps(b, _mm256_loadu_ps(sines + at));
            __m256 kept = _mm256_mul_ps(a, _mm256_loadu_ps(cosines + at));
            _mm256_storeu_ps(low, _mm256_sub_ps(kept, turned));
            turned = _mm256_mul_ps(a, _mm256_loadu_ps(sines + half + at));
            kept = _mm256_mul_ps(b, _mm256_loadu_ps(cosines + half + at));
            _mm256_storeu_ps(high, _mm256_add_ps(kept, turned));
        }
    }
}

/* Rotate queries, [rows, heads, size], and keys, in place. */
FOR_AVX2 void multiworld_rotate(float *query, float *key, const float *cosines,
                                const float *sines, const float *query_weight,
                                const float *key_weight, float epsilon, long rows,
                                long heads, long key_heads, long size, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * heads * size > ALONE)
    for (long row = 0; row < rows; row++) {
        const float *c = cosines + row * size, *s = sines + row * size;
        rotate(query + row * heads * size, heads, size, c, s, query_weight, epsilon);
        rotate(key + row * key_heads * size, key_heads, size, c, s, key_weight,
               epsilon);
    }
}

/* gate = gate / (1 + e^-gate) * up, of ``count`` numbers, a multiple of 8. */
FOR_AVX2 void multiworld_gate(float *gate, const float *up, long count, int threads) {
    const __m256 one = _mm256_set1_ps(1.0f), sign = _mm256_set1_ps(-0.0f);
#pragma omp parallel for num_threads(threads) if (count > ALONE)
    for (long at = 0; at < count; at += LANES) {
        __m256 x = _mm256_loadu_ps(gate + at);
        __m256 power = exponential(_mm256_or_ps(x, sign)); /* e^-|x| */
        /* x is negative: the power, else one. */
        __m256 above = _mm256_blendv_ps(one, power, x);
        __m256 share = _mm256_div_ps(above, _mm256_add_ps(one, power));
        x = _mm256_mul_ps(_mm256_mul_ps(x, share), _mm256_loadu_ps(up + at));
        _mm256_storeu_ps(gate + at, x);
    }
}
#endif
