/* What rows of a model go through on a CPU: products with weights in 8 bits, and what lies between
 * them. Compiled on the machine that runs it (build.py), called through ctypes (library.py).
 *
 * The definition of every function here is its PyTorch twin: kernels/products.py for products
 * (IntegerRows with plain_integers), norm.py, gate.py, rope.py and attention.py for the others.
 *
 * All functions may be called from any thread at any time: they write to what they are given and
 * to memory of their own. `threads` of them work on one call, by OpenMP where it was compiled in.
 *
 * Weights of a product lie in panels: PANEL output channels, and of these four columns at a time,
 * so that one load is what one instruction multiplies with four integers of a row:
 *
 *     packed [panels][columns / 4][PANEL][4]
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))

/* ---- integers of this CPU: sums of 16 channels, four columns at a time ---- */

#define LANES 16 /* channels of one Sums */
#define GROUP 4  /* columns that are multiplied at a time */

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && !defined(KVW_PLAIN)
/* unsigned times signed: codes of rows are moved up by SHIFT, and sums begin that much lower */
#define KIND "AVX-512 VNNI"
#define SHIFT 128
#define TILE_ROWS 12
#define TILE_VECS 2
typedef uint8_t Code;
typedef __m512i Sums;
typedef __m512i Weights;
typedef __m512i Four;
INLINE Sums begin(const int32_t *start) { return _mm512_loadu_si512(start); }
INLINE Weights weights_at(const int8_t *w) { return _mm512_loadu_si512(w); }
INLINE Four four_at(const Code *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm512_set1_epi32(four);
}
INLINE Sums dot(Sums s, Four x, Weights w) { return _mm512_dpbusd_epi32(s, x, w); }
INLINE void end(Sums s, int32_t *sums) { _mm512_storeu_si512(sums, s); }

#elif defined(__AVXVNNI__) && defined(__AVX2__) && !defined(KVW_PLAIN)
#define KIND "AVX VNNI"
#define SHIFT 128
#define TILE_ROWS 6
#define TILE_VECS 1
typedef uint8_t Code;
typedef struct { __m256i half[2]; } Sums;
typedef struct { __m256i half[2]; } Weights;
typedef __m256i Four;
INLINE __m256i load8(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE Sums begin(const int32_t *start) {
    return (Sums){{load8(start), load8(start + 8)}};
}
INLINE Weights weights_at(const int8_t *w) { return (Weights){{load8(w), load8(w + 32)}}; }
INLINE Four four_at(const Code *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm256_set1_epi32(four);
}
INLINE Sums dot(Sums s, Four x, Weights w) {
    s.half[0] = _mm256_dpbusd_avx_epi32(s.half[0], x, w.half[0]);
    s.half[1] = _mm256_dpbusd_avx_epi32(s.half[1], x, w.half[1]);
    return s;
}
INLINE void end(Sums s, int32_t *sums) {
    _mm256_storeu_si256((__m256i *)sums, s.half[0]);
    _mm256_storeu_si256((__m256i *)(sums + 8), s.half[1]);
}

#elif defined(__AVX2__) && !defined(KVW_PLAIN)
/* 16 bits wide: what multiplies 8 bits here adds pairs in 16, which overflow. A channel has two
 * sums, of columns 0, 1 and of columns 2, 3, until the end. */
#define KIND "AVX2"
#define SHIFT 0
#define TILE_ROWS 2
#define TILE_VECS 1
typedef int16_t Code;
typedef struct { __m256i of4[4]; } Sums;
typedef struct { __m256i of4[4]; } Weights;
typedef __m256i Four;
INLINE Sums begin(const int32_t *start) {
    (void)start; /* SHIFT is 0: all zeros */
    __m256i zero = _mm256_setzero_si256();
    return (Sums){{zero, zero, zero, zero}};
}
INLINE Weights weights_at(const int8_t *w) {
    Weights wide;
    for (int i = 0; i < 4; i++)
        wide.of4[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + 16 * i)));
    return wide;
}
INLINE Four four_at(const Code *x) {
    int64_t four;
    memcpy(&four, x, sizeof four);
    return _mm256_set1_epi64x(four);
}
INLINE Sums dot(Sums s, Four x, Weights w) {
    for (int i = 0; i < 4; i++)
        s.of4[i] = _mm256_add_epi32(s.of4[i], _mm256_madd_epi16(x, w.of4[i]));
    return s;
}
INLINE void end(Sums s, int32_t *sums) {
    for (int i = 0; i < 2; i++) {
        __m256i pairs = _mm256_hadd_epi32(s.of4[2 * i], s.of4[2 * i + 1]);
        __m256i inOrder = _mm256_permute4x64_epi64(pairs, 0xD8);
        _mm256_storeu_si256((__m256i *)(sums + 8 * i), inOrder);
    }
}

#elif defined(__ARM_FEATURE_DOTPROD) && !defined(KVW_PLAIN)
#define KIND "NEON dot product"
#define SHIFT 0
#define TILE_ROWS 6
#define TILE_VECS 1
typedef int8_t Code;
typedef struct { int32x4_t of4[4]; } Sums;
typedef struct { int8x16_t of4[4]; } Weights;
typedef int8x16_t Four;
INLINE Sums begin(const int32_t *start) {
    (void)start; /* SHIFT is 0: all zeros */
    int32x4_t zero = vdupq_n_s32(0);
    return (Sums){{zero, zero, zero, zero}};
}
INLINE Weights weights_at(const int8_t *w) {
    return (Weights){{vld1q_s8(w), vld1q_s8(w + 16), vld1q_s8(w + 32), vld1q_s8(w + 48)}};
}
INLINE Four four_at(const Code *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
}
INLINE Sums dot(Sums s, Four x, Weights w) {
    for (int i = 0; i < 4; i++) s.of4[i] = vdotq_s32(s.of4[i], w.of4[i], x);
    return s;
}
INLINE void end(Sums s, int32_t *sums) {
    for (int i = 0; i < 4; i++) vst1q_s32(sums + 4 * i, s.of4[i]);
}

#else
#define KIND "plain C"
#define SHIFT 0
#define TILE_ROWS 4
#define TILE_VECS 1
typedef int8_t Code;
typedef struct { int32_t of[LANES]; } Sums;
typedef const int8_t *Weights;
typedef const Code *Four;
INLINE Sums begin(const int32_t *start) {
    Sums s;
    memcpy(s.of, start, sizeof s.of);
    return s;
}
INLINE Weights weights_at(const int8_t *w) { return w; }
INLINE Four four_at(const Code *x) { return x; }
INLINE Sums dot(Sums s, Four x, Weights w) {
    for (int o = 0; o < LANES; o++)
        for (int c = 0; c < GROUP; c++) s.of[o] += (int32_t)x[c] * w[GROUP * o + c];
    return s;
}
INLINE void end(Sums s, int32_t *sums) { memcpy(sums, s.of, sizeof s.of); }
#endif

#define PANEL (LANES * TILE_VECS) /* channels */
#define BLOCK_ROWS (4 * TILE_ROWS) /* rows whose codes stay near while panels pass by */
#define PANEL_BYTES (192 << 10)     /* of panels that a thread takes at a time */
#define CHUNK_ROWS 1536             /* rows whose codes are in memory at a time */
#define FEW_ROWS 4                  /* rounded by the caller's thread: waiting would cost more */
#define AHEAD 2048                  /* bytes of weights that are asked for ahead, with few rows */

typedef struct {
    const int8_t *packed;  /* see above */
    const int32_t *start;  /* [panels * PANEL]: what sums begin with */
    const float *scale;    /* [panels * PANEL] */
    const float *bias;     /* [panels * PANEL], or none */
    const float *share;    /* [columns]: of a dim's value that a column takes; none: all of it */
    const int32_t *more;   /* [columns - in_dim]: dims of the columns behind */
    const float *offset;   /* [columns]: is added before integers are cut */
    int64_t in_dim, columns, out_dim;
} Product;

const char *kvw_kind(void) { return KIND; }

static int64_t whole(int64_t n, int64_t of) { return (n + of - 1) / of * of; }

int64_t kvw_padded_channels(int64_t out_dim) { return whole(out_dim, PANEL); }

/* codes [out_dim][columns] into panels, and what the sums of every channel begin with. Both are
 * for kvw_padded_channels; columns are filled up to whole groups with zeros. */
void kvw_pack(
    const int8_t *codes, int64_t out_dim, int64_t columns, int8_t *packed, int32_t *start) {
    int64_t width = whole(columns, GROUP);
    for (int64_t o = 0; o < whole(out_dim, PANEL); o++) {
        int8_t *to = packed + o / PANEL * PANEL * width + o % PANEL * GROUP;
        int32_t sum = 0;
        for (int64_t c = 0; c < width; c += GROUP, to += PANEL * GROUP) {
            int8_t four[GROUP] = {0};
            if (o < out_dim) memcpy(four, codes + o * columns + c, MIN(GROUP, columns - c));
            for (int i = 0; i < GROUP; i++) sum += four[i];
            memcpy(to, four, GROUP);
        }
        start[o] = -SHIFT * sum;
    }
}

/* A value over its row's scale as an integer; nan is one too. */
INLINE Code cut(float value, float offset) {
    float whole_value = floorf(value + offset);
    whole_value = whole_value > -127.0f ? whole_value : -127.0f;
    whole_value = whole_value < 127.0f ? whole_value : 127.0f;
    return (Code)((int32_t)whole_value + SHIFT);
}

/* One row in integers; returns its scale. A row with a value that is no number, or infinite, has a
 * scale that is neither, whatever its integers are. */
static float round_row(const Product *p, const float *restrict x, Code *restrict codes) {
    int64_t dims = p->in_dim, columns = p->columns;
    const float *restrict share = p->share, *restrict offset = p->offset;
    const int32_t *restrict more = p->more;
    int32_t top = 0; /* the bits of absolute values are ordered as they are, nan above all */
    for (int64_t i = 0; i < dims; i++) {
        float value = share ? x[i] * share[i] : x[i];
        int32_t bits;
        memcpy(&bits, &value, sizeof bits);
        bits &= 0x7fffffff;
        top = bits > top ? bits : top;
    }
    float largest;
    memcpy(&largest, &top, sizeof largest);
    float scale = (largest < 1e-10f ? 1e-10f : largest) / 127.0f;
    float inverse = 1.0f / scale;
    if (share == NULL) {
        for (int64_t c = 0; c < dims; c++) codes[c] = cut(x[c] * inverse, offset[c]);
    } else {
        for (int64_t c = 0; c < dims; c++) codes[c] = cut(x[c] * share[c] * inverse, offset[c]);
        for (int64_t c = dims; c < columns; c++)
            codes[c] = cut(x[more[c - dims]] * share[c] * inverse, offset[c]);
    }
    for (int64_t c = columns; c < whole(columns, GROUP); c++) codes[c] = SHIFT;
    return scale;
}

typedef struct {
    float *y;
    int64_t stride; /* between rows of y */
    int add;        /* to what is there */
} Target;

/* Sums of one row and one panel as numbers, where they belong. */
static void write_row(
    const Product *p, int64_t first, const int32_t *sums, float row_scale, float *y, int add) {
    float done[PANEL];
    for (int i = 0; i < PANEL; i++) done[i] = (float)sums[i] * p->scale[first + i] * row_scale;
    if (p->bias)
        for (int i = 0; i < PANEL; i++) done[i] += p->bias[first + i];
    int64_t count = MIN(PANEL, p->out_dim - first);
    if (count < PANEL)
        for (int64_t i = 0; i < count; i++) y[first + i] = add ? y[first + i] + done[i] : done[i];
    else if (add)
        for (int i = 0; i < PANEL; i++) y[first + i] += done[i];
    else
        for (int i = 0; i < PANEL; i++) y[first + i] = done[i];
}

/* Sums of `rows` rows (a constant where this is inlined) and one panel: all of them in registers
 * until the end. */
INLINE void multiply_tile(
    const Product *p, int64_t first, const Code *codes, const int rows, int32_t *out) {
    int64_t width = whole(p->columns, GROUP);
    const int8_t *w = p->packed + first * width;
    Sums sums[TILE_ROWS][TILE_VECS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < TILE_VECS; v++) sums[r][v] = begin(p->start + first + v * LANES);
    for (int64_t c = 0; c < width; c += GROUP, w += PANEL * GROUP) {
        Weights held[TILE_VECS];
#pragma GCC unroll 2
        for (int v = 0; v < TILE_VECS; v++) {
            if (rows <= FEW_ROWS) __builtin_prefetch(w + v * LANES * GROUP + AHEAD);
            held[v] = weights_at(w + v * LANES * GROUP);
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            Four x = four_at(codes + r * width + c);
#pragma GCC unroll 2
            for (int v = 0; v < TILE_VECS; v++) sums[r][v] = dot(sums[r][v], x, held[v]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < TILE_VECS; v++) end(sums[r][v], out + r * PANEL + v * LANES);
}

/* Rows [row, end) times one panel, in tiles. Codes have room behind for a whole tile. */
static void multiply_panel(
    const Product *p, int64_t panel, const Code *codes, const float *row_scale, int64_t row,
    int64_t end, Target to) {
    int64_t width = whole(p->columns, GROUP), first = panel * PANEL;
    int32_t sums[TILE_ROWS * PANEL];
    for (; row < end; row += TILE_ROWS) {
        int64_t left = MIN(end - row, TILE_ROWS);
        const Code *at = codes + row * width;
        if (left == 1)
            multiply_tile(p, first, at, 1, sums);
        else if (left == 2)
            multiply_tile(p, first, at, 2, sums);
#if TILE_ROWS > 4
        else if (left <= 4)
            multiply_tile(p, first, at, 4, sums);
#endif
#if TILE_ROWS > 8
        else if (left <= 8)
            multiply_tile(p, first, at, 8, sums);
#endif
        else
            multiply_tile(p, first, at, TILE_ROWS, sums);
        for (int64_t r = 0; r < left; r++) {
            float *y = to.y + (row + r) * to.stride;
            write_row(p, first, sums + r * PANEL, row_scale[row + r], y, to.add);
        }
    }
}

/* y [rows][out_dim] = x [rows][in_dim] times the weights, or += it; both with the stride of their
 * rows. Returns 0, or 1 where there was no memory: nothing is written then. */
int kvw_multiply(
    const Product *p, const float *x, int64_t x_stride, float *y, int64_t y_stride, int64_t rows,
    int add, int threads) {
    if (rows <= 0 || p->out_dim <= 0) return 0;
    int64_t width = whole(p->columns, GROUP), panels = whole(p->out_dim, PANEL) / PANEL;
    int64_t held = whole(MIN(rows, CHUNK_ROWS), TILE_ROWS);
    Code *codes = malloc(held * width * sizeof(Code) + 1); /* what fills a tile up is never used */
    float *row_scale = malloc(held * sizeof(float));
    if (codes == NULL || row_scale == NULL) {
        free(codes);
        free(row_scale);
        return 1;
    }
    for (int64_t done = 0; done < rows; done += CHUNK_ROWS) {
        int64_t count = MIN(rows - done, CHUNK_ROWS);
        const float *from = x + done * x_stride;
        Target to = {y + done * y_stride, y_stride, add};
        int64_t blocks = whole(count, BLOCK_ROWS) / BLOCK_ROWS;
        /* as many panels at a time as stay near, but several turns for every thread */
        int64_t near = PANEL_BYTES / (PANEL * width), fair = panels * blocks / (4 * threads);
        int64_t step = MIN(near, fair);
        step = step < 1 ? 1 : step;
        int64_t steps = whole(panels, step) / step;
        if (count <= FEW_ROWS)
            for (int64_t r = 0; r < count; r++)
                row_scale[r] = round_row(p, from + r * x_stride, codes + r * width);
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            if (count > FEW_ROWS) {
#pragma omp for schedule(static)
                for (int64_t r = 0; r < count; r++)
                    row_scale[r] = round_row(p, from + r * x_stride, codes + r * width);
            }
#pragma omp for schedule(dynamic, 1)
            for (int64_t turn = 0; turn < blocks * steps; turn++) {
                int64_t first = turn / steps * BLOCK_ROWS, start = turn % steps * step;
                int64_t end = MIN(first + BLOCK_ROWS, count);
                for (int64_t n = start; n < MIN(start + step, panels); n++)
                    multiply_panel(p, n, codes, row_scale, first, end, to);
            }
        }
    }
    free(codes);
    free(row_scale);
    return 0;
}

/* ---- what lies between the products ---- */

#define PARALLEL_VALUES (32 << 10) /* values from which on several threads are worth waking */

#if defined(__AVX512F__)
#define WIDTH 16 /* floats of a vector */
#define VECS 2   /* vectors side by side in a small product */
#define DEEP 8   /* rows of it */
#elif defined(__AVX__)
#define WIDTH 8
#define VECS 2
#define DEEP 4
#else
#define WIDTH 4
#define VECS 4
#define DEEP 4
#endif

typedef float Vec __attribute__((vector_size(4 * WIDTH)));

INLINE Vec load_vec(const float *from) {
    Vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE float sum_lanes(Vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float sum = 0.0f;
    for (int n = 0; n < WIDTH; n++) sum += v[n];
    return sum;
#endif
}

/* Sums in the lanes of two vectors: a plain sum has one order, and that one is slow. The order
 * depends on the length alone. */
INLINE float dot_floats(const float *a, const float *b, int64_t count) {
    Vec even = {0}, odd = {0};
    int64_t i = 0;
    for (; i + 2 * WIDTH <= count; i += 2 * WIDTH) {
        even += load_vec(a + i) * load_vec(b + i);
        odd += load_vec(a + i + WIDTH) * load_vec(b + i + WIDTH);
    }
    float sum = sum_lanes(even + odd);
    for (; i < count; i++) sum += a[i] * b[i];
    return sum;
}

/* e^x to about 2 units in the last place; x within ±87, beyond which it stays. nan is nan. */
INLINE float exp_near(float x) {
    x = x > 87.0f ? 87.0f : x;
    x = x < -87.0f ? -87.0f : x;
    float n = floorf(x * 1.44269504f + 0.5f); /* x = n ln 2 + rest */
    float rest = x - n * 0.693359375f;
    rest = rest - n * -2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * rest + 1.3981999507e-3f;
    y = y * rest + 8.3334519073e-3f;
    y = y * rest + 4.1665795894e-2f;
    y = y * rest + 1.6666665459e-1f;
    y = y * rest + 5.0000001201e-1f;
    y = y * rest * rest + rest + 1.0f;
    int32_t whole_power = (n == n ? (int32_t)n : 0) + 127;
    whole_power <<= 23;
    float power;
    memcpy(&power, &whole_power, sizeof power);
    return y * power;
}

/* y = x / rms(x) * weight, row by row; y may be x. */
void kvw_rms_norm(
    const float *x, int64_t x_stride, const float *weight, float eps, float *y, int64_t y_stride,
    int64_t rows, int64_t dim, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * dim > PARALLEL_VALUES)
    for (int64_t r = 0; r < rows; r++) {
        const float *from = x + r * x_stride;
        float *to = y + r * y_stride;
        float scale = 1.0f / sqrtf(dot_floats(from, from, dim) / (float)dim + eps);
        for (int64_t i = 0; i < dim; i++) to[i] = from[i] * scale * weight[i];
    }
}

/* The first half of each row, gates, becomes silu(gate) times the second half. */
void kvw_silu_mul(float *gate_up, int64_t stride, int64_t rows, int64_t inner, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * inner > PARALLEL_VALUES)
    for (int64_t r = 0; r < rows; r++) {
        float *gate = gate_up + r * stride;
        const float *up = gate + inner;
        for (int64_t i = 0; i < inner; i++)
            gate[i] = gate[i] / (1.0f + exp_near(-gate[i])) * up[i];
    }
}

/* Strides of rows and of heads are in floats; dims lie side by side. */

/* Turn x [rows][heads][dim] by the angles of its rows (heads alike, unless they have a stride) into
 * y, which must not overlap x. Pairs are (j, j + half); what lies behind them is copied. */
void kvw_rotate(
    const float *x, int64_t x_row, int64_t x_head, const float *cos, const float *sin,
    int64_t turn_row, int64_t turn_head, float *y, int64_t y_row, int64_t y_head, int64_t rows,
    int64_t heads, int64_t dim, int64_t half, int threads) {
    int is_large = threads > 1 && rows * heads * dim > PARALLEL_VALUES;
#pragma omp parallel for num_threads(threads) if (is_large)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < heads; h++) {
            const float *from = x + r * x_row + h * x_head;
            const float *c = cos + r * turn_row + h * turn_head;
            const float *s = sin + r * turn_row + h * turn_head;
            float *restrict to = y + r * y_row + h * y_head;
            for (int64_t j = 0; j < half; j++) {
                to[j] = from[j] * c[j] - from[j + half] * s[j];
                to[j + half] = from[j + half] * c[j] + from[j] * s[j];
            }
            for (int64_t j = 2 * half; j < dim; j++) to[j] = from[j];
        }
}

#define KEY_BLOCK 128 /* keys that are looked at together: how a row is cut, whatever the threads */
#define CHUNK 4       /* vectors of sums in registers */

/* sums [dim] = weights [count] times values [count][dim] with a stride */
static void weigh(
    const float *weights, const float *values, int64_t stride, int64_t count, int64_t dim,
    float *sums) {
    int64_t i = 0;
    for (; i + CHUNK * WIDTH <= dim; i += CHUNK * WIDTH) {
        Vec held[CHUNK] = {{0}};
        for (int64_t n = 0; n < count; n++)
#pragma GCC unroll 4
            for (int v = 0; v < CHUNK; v++)
                held[v] += load_vec(values + n * stride + i + v * WIDTH) * weights[n];
        memcpy(sums + i, held, sizeof held);
    }
    for (; i < dim; i++) {
        float sum = 0.0f;
        for (int64_t n = 0; n < count; n++) sum += values[n * stride + i] * weights[n];
        sums[i] = sum;
    }
}

/* One row of queries [kv_heads * group][dim] over `keys` and `values` [num_keys][kv_heads][dim];
 * the queries of a KV head look at it together. Blocks of keys have a softmax each, and are put
 * together at the end. Returns 0, or 1 where there was no memory. */
int kvw_attend_row(
    const float *q, const float *keys, int64_t key_row, int64_t key_head, const float *values,
    int64_t value_row, int64_t value_head, float *out, int64_t num_keys, int64_t kv_heads,
    int64_t group, int64_t dim, float scale, int threads) {
    int64_t blocks = whole(num_keys, KEY_BLOCK) / KEY_BLOCK, size = dim + 2;
    /* of every block and query head: largest score, sum of weights, weighted sum of values */
    float *parts = malloc(blocks * kv_heads * group * size * sizeof(float));
    if (parts == NULL) return 1;
    int is_large = threads > 1 && num_keys * kv_heads * dim > PARALLEL_VALUES;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (is_large)
    for (int64_t turn = 0; turn < blocks * kv_heads; turn++) {
        int64_t first = turn / kv_heads * KEY_BLOCK, h = turn % kv_heads;
        int64_t count = MIN(KEY_BLOCK, num_keys - first);
        for (int64_t g = 0; g < group; g++) {
            float scores[KEY_BLOCK], top = -INFINITY, total = 0.0f;
            const float *asks = q + (h * group + g) * dim;
            float *part = parts + (turn * group + g) * size;
            const float *key = keys + first * key_row + h * key_head;
            for (int64_t n = 0; n < count; n++, key += key_row)
                scores[n] = scale * dot_floats(asks, key, dim);
            for (int64_t n = 0; n < count; n++) top = scores[n] > top ? scores[n] : top;
            for (int64_t n = 0; n < count; n++) scores[n] = exp_near(scores[n] - top);
            for (int64_t n = 0; n < count; n++) total += scores[n];
            part[0] = top;
            part[1] = total;
            const float *value = values + first * value_row + h * value_head;
            weigh(scores, value, value_row, count, dim, part + 2);
        }
    }
    for (int64_t head = 0; head < kv_heads * group; head++) {
        float top = -INFINITY, total = 0.0f, *to = out + head * dim;
        for (int64_t b = 0; b < blocks; b++) {
            float *part = parts + (b * kv_heads * group + head) * size;
            top = part[0] > top ? part[0] : top;
        }
        for (int64_t i = 0; i < dim; i++) to[i] = 0.0f;
        for (int64_t b = 0; b < blocks; b++) {
            float *part = parts + (b * kv_heads * group + head) * size;
            float weight = exp_near(part[0] - top);
            total += weight * part[1];
            for (int64_t i = 0; i < dim; i++) to[i] += weight * part[2 + i];
        }
        for (int64_t i = 0; i < dim; i++) to[i] /= total;
    }
    free(parts);
    return 0;
}

/* ---- attention of many rows ---- */

/* Queries lie across the lanes of vectors, keys and dims go along memory: then the softmax of a row
 * stays in its lane, and nothing is ever added up across lanes. What a lane computes does not
 * depend on the lanes beside it. */

#define QUERIES 32    /* of one task: lanes */
#define KEYS 64       /* that are looked at together */
#define MOST_DIM 256  /* of a head */
#define HIDDEN -1e30f /* score of a key that a row does not see */

/* out [rows][QUERIES] (+)= sum over k of a [rows][depth] (strides) times b [depth][QUERIES]; rows
 * is a constant where this is inlined. */
INLINE void small_product(
    const float *a, int64_t a_row, int64_t a_depth, const float *b, float *out, const int rows,
    int64_t depth, int add) {
    for (int lane = 0; lane < QUERIES; lane += VECS * WIDTH) {
        Vec sums[DEEP][VECS];
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) {
                float *at = out + r * QUERIES + lane + v * WIDTH;
                sums[r][v] = add ? load_vec(at) : (Vec){0};
            }
        for (int64_t k = 0; k < depth; k++) {
            Vec held[VECS];
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) held[v] = load_vec(b + k * QUERIES + lane + v * WIDTH);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
                for (int v = 0; v < VECS; v++) sums[r][v] += held[v] * a[r * a_row + k * a_depth];
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++)
                memcpy(out + r * QUERIES + lane + v * WIDTH, &sums[r][v], sizeof(Vec));
    }
}

static void product(
    const float *a, int64_t a_row, int64_t a_depth, const float *b, float *out, int64_t rows,
    int64_t depth, int add) {
    int64_t r = 0;
    for (; r + DEEP <= rows; r += DEEP)
        small_product(a + r * a_row, a_row, a_depth, b, out + r * QUERIES, DEEP, depth, add);
    for (; r < rows; r++)
        small_product(a + r * a_row, a_row, a_depth, b, out + r * QUERIES, 1, depth, add);
}

typedef struct {
    const float *q;
    int64_t q_row, q_head;
    const int64_t *positions; /* of the rows, ascending: a row sees the keys up to its own */
    const float *keys, *values;
    int64_t key_row, key_head, value_row, value_head;
    float *out; /* [rows][kv_heads * group][dim] */
    int64_t rows, kv_heads, group, dim;
    float scale;
} Attention;

/* `value` for keys that lanes do not see. */
static void hide(float *weights, const int32_t *left, int64_t count, float value) {
    for (int32_t k = 0; k < count; k++)
        for (int n = 0; n < QUERIES; n++)
            weights[k * QUERIES + n] = k < left[n] ? weights[k * QUERIES + n] : value;
}

/* Lanes [first, first + QUERIES) of KV head h: lane n is query head n % group of row n / group. */
static void attend_lanes(const Attention *t, int64_t h, int64_t first) {
    float turned[MOST_DIM * QUERIES] __attribute__((aligned(64)));  /* queries [dim][lanes] */
    float weights[KEYS * QUERIES] __attribute__((aligned(64)));     /* [keys][lanes] */
    float sums[MOST_DIM * QUERIES] __attribute__((aligned(64)));    /* of values [dim][lanes] */
    float top[QUERIES], total[QUERIES], fade[QUERIES];
    int64_t seen[QUERIES], dim = t->dim;
    int32_t left[QUERIES]; /* keys of a block that a lane sees */
    int64_t lanes = MIN(QUERIES, t->rows * t->group - first);
    for (int64_t n = 0; n < QUERIES; n++) {
        int64_t at = first + MIN(n, lanes - 1); /* lanes that are left over repeat the last one */
        const float *q = t->q + at / t->group * t->q_row;
        q += (h * t->group + at % t->group) * t->q_head;
        for (int64_t i = 0; i < dim; i++) turned[i * QUERIES + n] = q[i] * t->scale;
        seen[n] = t->positions[at / t->group] + 1;
        top[n] = HIDDEN;
        total[n] = 0.0f;
    }
    memset(sums, 0, dim * QUERIES * sizeof(float));
    for (int64_t start = 0; start < seen[QUERIES - 1]; start += KEYS) {
        int64_t count = MIN(KEYS, seen[QUERIES - 1] - start);
        const float *keys = t->keys + start * t->key_row + h * t->key_head;
        const float *values = t->values + start * t->value_row + h * t->value_head;
        int is_edge = start + count > seen[0]; /* some lanes do not see all of these */
        for (int n = 0; n < QUERIES; n++) left[n] = (int32_t)MIN(seen[n] - start, KEYS);
        product(keys, t->key_row, 1, turned, weights, count, dim, 0);
        if (is_edge) hide(weights, left, count, HIDDEN);
        for (int n = 0; n < QUERIES; n++) fade[n] = top[n];
        for (int64_t k = 0; k < count; k++)
            for (int n = 0; n < QUERIES; n++) {
                float score = weights[k * QUERIES + n];
                top[n] = score > top[n] ? score : top[n];
            }
        for (int n = 0; n < QUERIES; n++) fade[n] = exp_near(fade[n] - top[n]);
        for (int64_t k = 0; k < count; k++)
            for (int n = 0; n < QUERIES; n++)
                weights[k * QUERIES + n] = exp_near(weights[k * QUERIES + n] - top[n]);
        if (is_edge) hide(weights, left, count, 0.0f); /* nothing at all, whatever the values are */
        for (int n = 0; n < QUERIES; n++) total[n] *= fade[n];
        for (int64_t k = 0; k < count; k++)
            for (int n = 0; n < QUERIES; n++) total[n] += weights[k * QUERIES + n];
        for (int64_t i = 0; i < dim; i++)
            for (int n = 0; n < QUERIES; n++) sums[i * QUERIES + n] *= fade[n];
        product(values, 1, t->value_row, weights, sums, dim, count, 1);
    }
    for (int64_t n = 0; n < lanes; n++) {
        int64_t row = (first + n) / t->group, head = h * t->group + (first + n) % t->group;
        float *out = t->out + (row * t->kv_heads * t->group + head) * dim;
        for (int64_t i = 0; i < dim; i++) out[i] = sums[i * QUERIES + n] / total[n];
    }
}

/* Every row over the keys up to its position. dim is at most MOST_DIM (kvw_most_dim). */
void kvw_attend_rows(const Attention *t, int threads) {
    int64_t tiles = whole(t->rows * t->group, QUERIES) / QUERIES;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (threads > 1)
    for (int64_t turn = 0; turn < tiles * t->kv_heads; turn++) {
        /* the last rows see most: they go first, so that no thread is left with one at the end */
        int64_t tile = tiles - 1 - turn / t->kv_heads;
        attend_lanes(t, turn % t->kv_heads, tile * QUERIES);
    }
}

int64_t kvw_most_dim(void) { return MOST_DIM; }
