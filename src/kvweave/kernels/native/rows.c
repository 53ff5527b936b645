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

#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))

/* ---- integers of this CPU: sums of 16 channels, four columns at a time ---- */

#define LANES 16 /* channels of one Sums */
#define GROUP 4  /* columns that are multiplied at a time */

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && !defined(KVW_PLAIN)
/* unsigned times signed: codes of rows are moved up by SHIFT, and sums begin that much lower */
#include <immintrin.h>
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
#include <immintrin.h>
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
#include <immintrin.h>
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
#include <arm_neon.h>
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
#define BLOCK_ROWS (16 * TILE_ROWS) /* rows whose codes stay near while panels pass by */
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
        int8_t *panel = packed + o / PANEL * PANEL * width;
        int32_t sum = 0;
        for (int64_t c = 0; c < width; c++) {
            int8_t code = o < out_dim && c < columns ? codes[o * columns + c] : 0;
            panel[(c / GROUP * PANEL + o % PANEL) * GROUP + c % GROUP] = code;
            sum += code;
        }
        start[o] = -SHIFT * sum;
    }
}

/* One row in integers; returns its scale. A row with a value that is no number, or infinite, has a
 * scale that is neither, whatever its integers are. */
static float round_row(const Product *p, const float *x, Code *codes) {
    int64_t dims = p->in_dim, columns = p->columns;
    int32_t top = 0; /* the bits of absolute values are ordered as they are, nan above all */
    for (int64_t i = 0; i < dims; i++) {
        float value = p->share ? x[i] * p->share[i] : x[i];
        int32_t bits;
        memcpy(&bits, &value, sizeof bits);
        bits &= 0x7fffffff;
        top = bits > top ? bits : top;
    }
    float largest;
    memcpy(&largest, &top, sizeof largest);
    float scale = (largest < 1e-10f ? 1e-10f : largest) / 127.0f;
    float inverse = 1.0f / scale;
#define ROUNDED(value, c)                                                                          \
    do {                                                                                           \
        float cut = floorf((value) * inverse + p->offset[c]);                                        \
        cut = cut > -127.0f ? cut : -127.0f; /* nan too */                                         \
        cut = cut < 127.0f ? cut : 127.0f;                                                         \
        codes[c] = (Code)((int32_t)cut + SHIFT);                                                   \
    } while (0)
    if (p->share == NULL) {
        for (int64_t c = 0; c < dims; c++) ROUNDED(x[c], c);
    } else {
        for (int64_t c = 0; c < dims; c++) ROUNDED(x[c] * p->share[c], c);
        for (int64_t c = dims; c < columns; c++) ROUNDED(x[p->more[c - dims]] * p->share[c], c);
    }
#undef ROUNDED
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
