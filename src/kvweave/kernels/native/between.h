/* ---- what lies between the products ---- */

#define PARALLEL_VALUES (32 << 10) /* values from which on several threads are worth waking */

#if defined(__AVX512F__)
#define WIDTH 16   /* floats of a vector */
#define VECS 3     /* vectors side by side in a small product */
#define DEEP 8     /* rows of it */
#define QUERIES 48 /* lanes of a tile of many rows */
#elif defined(__AVX__)
#define WIDTH 8
#define VECS 2
#define DEEP 4
#define QUERIES 32
#else
#define WIDTH 4
#define VECS 4
#define DEEP 4
#define QUERIES 32
#endif

typedef float Vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t IntVec __attribute__((vector_size(4 * WIDTH)));

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

INLINE Vec larger(Vec a, Vec b) {
#if defined(__AVX512F__)
    return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__ARM_NEON)
    return (Vec)vmaxnmq_f32((float32x4_t)a, (float32x4_t)b);
#else
    Vec most;
    for (int n = 0; n < WIDTH; n++) most[n] = a[n] > b[n] ? a[n] : b[n];
    return most;
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
    for (; i < count; i += WIDTH) { /* never number by number: products would be rounded */
        int64_t bytes = MIN(WIDTH, count - i) * (int64_t)sizeof(float);
        Vec of_a = {0}, of_b = {0};
        memcpy(&of_a, a + i, bytes);
        memcpy(&of_b, b + i, bytes);
        even += of_a * of_b;
    }
    return sum_lanes(even + odd);
}

/* e^x of x up to 87, to about 2 units in the last place; below -87 it stays. nan is nan. */
INLINE float exp_below(float x) {
    const float shift = 12582912.0f; /* 1.5 · 2^23: what is added to it is rounded to a whole one */
    x = x < -87.0f ? -87.0f : x;
    float moved = x * 1.44269504f + shift;
    float n = moved - shift; /* x = n ln 2 + rest */
    float rest = x - n * 0.693359375f;
    rest = rest - n * -2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * rest + 1.3981999507e-3f;
    y = y * rest + 8.3334519073e-3f;
    y = y * rest + 4.1665795894e-2f;
    y = y * rest + 1.6666665459e-1f;
    y = y * rest + 5.0000001201e-1f;
    y = y * rest * rest + rest + 1.0f;
    uint32_t bits; /* the last ones of the moved number are n: they become an exponent */
    memcpy(&bits, &moved, sizeof bits);
    bits = (bits << 23) + 0x3f800000u;
    float power;
    memcpy(&power, &bits, sizeof power);
    return y * power;
}

/* The same, for every x; it stays beyond ±87. */
INLINE float exp_near(float x) { return exp_below(x > 87.0f ? 87.0f : x); }

/* One row; `to` may be `from`. */
static __attribute__((noinline)) void norm_row(const float *from, const float *weight, float eps, float *to, int64_t dim) {
    float scale = 1.0f / sqrtf(dot_floats(from, from, dim) / (float)dim + eps);
    for (int64_t i = 0; i < dim; i++) to[i] = from[i] * scale * weight[i];
}

/* y = x / rms(x) * weight, row by row; y may be x. */
void kvw_rms_norm(
    const float *x, int64_t x_stride, const float *weight, float eps, float *y, int64_t y_stride,
    int64_t rows, int64_t dim, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * dim > PARALLEL_VALUES)
    for (int64_t r = 0; r < rows; r++)
        norm_row(x + r * x_stride, weight, eps, y + r * y_stride, dim);
}

/* silu(gate) times up; `to` may be `gate`. */
static __attribute__((noinline)) void gate_row(const float *gate, const float *up, float *to, int64_t inner) {
    for (int64_t i = 0; i < inner; i++) to[i] = gate[i] / (1.0f + exp_near(-gate[i])) * up[i];
}

/* The first half of each row, gates, becomes silu(gate) times the second half. */
void kvw_silu_mul(float *gate_up, int64_t stride, int64_t rows, int64_t inner, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * inner > PARALLEL_VALUES)
    for (int64_t r = 0; r < rows; r++) {
        float *gate = gate_up + r * stride;
        gate_row(gate, gate + inner, gate, inner);
    }
}

/* One head of one row: pairs are (j, j + half); what lies behind them is copied. */
static __attribute__((noinline)) void turn_head(
    const float *from, const float *c, const float *s, float *restrict to, int64_t dim,
    int64_t half) {
    for (int64_t j = 0; j < half; j++) {
        to[j] = from[j] * c[j] - from[j + half] * s[j];
        to[j + half] = from[j + half] * c[j] + from[j] * s[j];
    }
    for (int64_t j = 2 * half; j < dim; j++) to[j] = from[j];
}

/* Strides of rows and of heads are in floats; dims lie side by side. */

/* Turn x [rows][heads][dim] by the angles of its rows (heads alike, unless they have a stride) into
 * y, which must not overlap x. */
void kvw_rotate(
    const float *x, int64_t x_row, int64_t x_head, const float *cos, const float *sin,
    int64_t angle_row, int64_t angle_head, float *y, int64_t y_row, int64_t y_head, int64_t rows,
    int64_t heads, int64_t dim, int64_t half, int threads) {
    int is_large = threads > 1 && rows * heads * dim > PARALLEL_VALUES;
#pragma omp parallel for num_threads(threads) if (is_large)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t h = 0; h < heads; h++) {
            const float *from = x + r * x_row + h * x_head;
            int64_t at = r * angle_row + h * angle_head;
            turn_head(from, cos + at, sin + at, y + r * y_row + h * y_head, dim, half);
        }
}
