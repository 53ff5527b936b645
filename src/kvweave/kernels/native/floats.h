/* ---- products with weights in float32 ----
 *
 * A sum has one order, whatever is computed beside it: chains of fused products, each dim by dim
 * from zero, and the chains one after the other. Where a chain ends depends on the dims alone.
 *
 * Weights lie as the checkpoint has them, [out_dim][in_dim]. Some dims of a few channels at a time
 * are turned to [dims][channels], so that a vector holds the sums of as many channels.
 */

#if defined(__AVX512F__)
#define FLOAT_VECS 3 /* vectors of channels in a panel */
#define FLOAT_TILE 8 /* rows whose sums are in registers */
#elif defined(__AVX__)
#define FLOAT_VECS 2
#define FLOAT_TILE 6
#elif defined(__aarch64__)
#define FLOAT_VECS 4
#define FLOAT_TILE 6
#else
#define FLOAT_VECS 2
#define FLOAT_TILE 4
#endif
#define FLOAT_PANEL (FLOAT_VECS * WIDTH) /* channels */
#define FLOAT_STRIP 4   /* most panels that a thread takes at a time */
#define FLOAT_CHUNK 512 /* most rows that it takes at a time */
#define CHAIN_DIMS 640  /* most dims of a chain */
#define AHEAD_DIMS 128   /* of weights that are asked for ahead, for few rows */
#define LINE 16         /* floats that come from memory together */
#define SOON 16         /* dims of turned weights that are asked for ahead */

/* A product, rounded or as it is. */
typedef struct {
    const Product *rounded; /* none: float32 */
    const float *weight;    /* [out_dim][in_dim] */
    const float *bias;      /* [out_dim], or none */
    int64_t in_dim, out_dim;
} Matrix;

INLINE Vec add_product(Vec sum, Vec a, float b) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)a, _mm512_set1_ps(b), (__m512)sum);
#elif defined(__FMA__)
    return (Vec)_mm256_fmadd_ps((__m256)a, _mm256_set1_ps(b), (__m256)sum);
#elif defined(__aarch64__)
    return (Vec)vfmaq_n_f32((float32x4_t)sum, (float32x4_t)a, b);
#else
    return sum + a * b;
#endif
}

/* Four floats of every fourth row, from row 0 on, in the quarters of a vector. */
INLINE Vec quarters_at(const float *from, int64_t stride) {
#if defined(__AVX512F__)
    __m512 v = _mm512_castps128_ps512(_mm_loadu_ps(from));
    v = _mm512_insertf32x4(v, _mm_loadu_ps(from + 4 * stride), 1);
    v = _mm512_insertf32x4(v, _mm_loadu_ps(from + 8 * stride), 2);
    return (Vec)_mm512_insertf32x4(v, _mm_loadu_ps(from + 12 * stride), 3);
#elif defined(__AVX__)
    __m256 v = _mm256_castps128_ps256(_mm_loadu_ps(from));
    return (Vec)_mm256_insertf128_ps(v, _mm_loadu_ps(from + 4 * stride), 1);
#else
    (void)stride;
    return load_vec(from);
#endif
}

#if defined(__AVX512F__)
#define PAIRS(a, b, i, j)                                                                          \
    __builtin_shufflevector(a, b, i, 16 + i, j, 16 + j, 4 + i, 20 + i, 4 + j, 20 + j, 8 + i,       \
                            24 + i, 8 + j, 24 + j, 12 + i, 28 + i, 12 + j, 28 + j)
#define HALVES(a, b, i)                                                                            \
    __builtin_shufflevector(a, b, i, i + 1, 16 + i, 17 + i, 4 + i, 5 + i, 20 + i, 21 + i, 8 + i,   \
                            9 + i, 24 + i, 25 + i, 12 + i, 13 + i, 28 + i, 29 + i)
#elif defined(__AVX__)
#define PAIRS(a, b, i, j)                                                                          \
    __builtin_shufflevector(a, b, i, 8 + i, j, 8 + j, 4 + i, 12 + i, 4 + j, 12 + j)
#define HALVES(a, b, i)                                                                            \
    __builtin_shufflevector(a, b, i, i + 1, 8 + i, 9 + i, 4 + i, 5 + i, 12 + i, 13 + i)
#else
#define PAIRS(a, b, i, j) __builtin_shufflevector(a, b, i, 4 + i, j, 4 + j)
#define HALVES(a, b, i) __builtin_shufflevector(a, b, i, i + 1, 4 + i, 5 + i)
#endif

/* Four dims of WIDTH channels from `w` on, a vector each. */
INLINE void turn_four(const float *w, int64_t stride, Vec four[4]) {
    Vec a = quarters_at(w, stride), b = quarters_at(w + stride, stride);
    Vec c = quarters_at(w + 2 * stride, stride), d = quarters_at(w + 3 * stride, stride);
    Vec ab = PAIRS(a, b, 0, 1), cd = PAIRS(c, d, 0, 1);
    Vec ab_high = PAIRS(a, b, 2, 3), cd_high = PAIRS(c, d, 2, 3);
    four[0] = HALVES(ab, cd, 0);
    four[1] = HALVES(ab, cd, 2);
    four[2] = HALVES(ab_high, cd_high, 0);
    four[3] = HALVES(ab_high, cd_high, 2);
}

/* One dim of `channels` channels; zeros stand for those that lack. */
INLINE Vec turn_one(const float *w, int64_t stride, int64_t channels) {
    float one[WIDTH];
    Vec v;
    for (int64_t c = 0; c < WIDTH; c++) one[c] = c < channels ? w[c * stride] : 0.0f;
    memcpy(&v, one, sizeof v);
    return v;
}

/* `dims` dims of `channels` channels from `w` on as [dims][FLOAT_PANEL]. What lies at `ahead` comes
 * next: it is asked for. */
static __attribute__((noinline)) void turn_weights(
    const float *w, int64_t stride, int64_t dims, int64_t channels, const float *ahead,
    float *turned) {
    for (int64_t first = 0; first < FLOAT_PANEL; first += WIDTH) {
        const float *from = w + first * stride;
        float *to = turned + first;
        int64_t i = 0;
        for (; channels - first >= WIDTH && i + 4 <= dims; i += 4) {
            Vec four[4];
            if (i % LINE == 0)
                for (int c = 0; c < WIDTH; c++) __builtin_prefetch(ahead + (first + c) * stride + i);
            turn_four(from + i, stride, four);
            for (int k = 0; k < 4; k++) memcpy(to + (i + k) * FLOAT_PANEL, four + k, sizeof four[k]);
        }
        for (; i < dims; i++) {
            Vec one = turn_one(from + i, stride, channels - first);
            memcpy(to + i * FLOAT_PANEL, &one, sizeof one);
        }
    }
}

/* Chains of `rows` rows (a constant where this is inlined) and a panel of turned weights, to sums
 * [rows][FLOAT_PANEL]. */
INLINE void multiply_float_tile(
    const float *w, const float *x, int64_t stride, int64_t dims, const int rows, float *sums) {
    Vec held[FLOAT_TILE][FLOAT_VECS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < FLOAT_VECS; v++) held[r][v] = (Vec){0};
    for (int64_t i = 0; i < dims; i++, w += FLOAT_PANEL) {
        Vec weights[FLOAT_VECS];
#pragma GCC unroll 4
        for (int v = 0; v < FLOAT_VECS; v++) {
            __builtin_prefetch(w + SOON * FLOAT_PANEL + v * WIDTH);
            weights[v] = load_vec(w + v * WIDTH);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < FLOAT_VECS; v++)
                held[r][v] = add_product(held[r][v], weights[v], x[r * stride + i]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < FLOAT_VECS; v++)
            memcpy(sums + r * FLOAT_PANEL + v * WIDTH, &held[r][v], sizeof held[r][v]);
}

static __attribute__((noinline)) void multiply_float_rows(
    const float *w, const float *x, int64_t stride, int64_t dims, int64_t rows, float *sums) {
    switch (rows) {
#define CASE(n)                                                                                    \
    case n: multiply_float_tile(w, x, stride, dims, n, sums); return;
        CASE(1) CASE(2) CASE(3) CASE(4)
#if FLOAT_TILE > 4
        CASE(5) CASE(6)
#endif
#if FLOAT_TILE > 6
        CASE(7) CASE(8)
#endif
#undef CASE
    }
}

/* Dims of each chain of a product but the last, which may have fewer. */
INLINE int64_t chain_dims(int64_t dims) {
    int64_t chains = whole(dims, CHAIN_DIMS) / CHAIN_DIMS;
    return chains < 2 ? dims : whole(whole(dims, chains) / chains, LINE);
}

/* The sums of a chain join what one row has of `count` channels from `first` on, WIDTH at most:
 * those of the first chain the bias, and what stood there if it is added to. */
INLINE void join_chain(
    const Matrix *m, int64_t first, int64_t count, Vec sums, int is_first, float *y, int add) {
    Vec there = {0}, bias = {0};
    int64_t bytes = count * (int64_t)sizeof(float);
    if (is_first && m->bias) {
        memcpy(&bias, m->bias + first, bytes);
        sums += bias;
    }
    if (!is_first || add) {
        memcpy(&there, y + first, bytes);
        sums = there + sums;
    }
    memcpy(y + first, &sums, bytes);
}

/* join_chain for every vector of a panel. */
INLINE void join_panel(
    const Matrix *m, int64_t first, int64_t count, const float *sums, int is_first, float *y, int add) {
    if (count == FLOAT_PANEL)
#pragma GCC unroll 4
        for (int i = 0; i < FLOAT_PANEL; i += WIDTH)
            join_chain(m, first + i, WIDTH, load_vec(sums + i), is_first, y, add);
    else
        for (int64_t i = 0; i < count; i += WIDTH)
            join_chain(m, first + i, MIN(WIDTH, count - i), load_vec(sums + i), is_first, y, add);
}

/* `rows` rows (a constant where this is inlined) times WIDTH channels at most. */
INLINE void multiply_vector(
    const Matrix *m, const float *x, int64_t stride, const int rows, int64_t first, Target to) {
    int64_t dims = m->in_dim, length = chain_dims(dims), count = MIN(WIDTH, m->out_dim - first);
    const float *w = m->weight + first * dims;
    for (int64_t i = 0; i < dims;) {
        int64_t chain = i, end = MIN(chain + length, dims);
        Vec sums[FEW_ROWS] = {{0}};
        for (; count == WIDTH && i + 4 <= end; i += 4) {
            Vec four[4];
            if (i % LINE == 0) {
                const float *ahead = i + AHEAD_DIMS < dims ? w + i + AHEAD_DIMS
                                                           : w + WIDTH * dims + i + AHEAD_DIMS - dims;
                for (int c = 0; c < WIDTH; c++) __builtin_prefetch(ahead + c * dims);
            }
            turn_four(w + i, dims, four);
            for (int k = 0; k < 4; k++)
                for (int r = 0; r < rows; r++)
                    sums[r] = add_product(sums[r], four[k], x[r * stride + i + k]);
        }
        for (; i < end; i++) {
            Vec one = turn_one(w + i, dims, count);
            for (int r = 0; r < rows; r++) sums[r] = add_product(sums[r], one, x[r * stride + i]);
        }
        for (int r = 0; r < rows; r++)
            join_chain(m, first, count, sums[r], chain == 0, to.y + r * to.stride, to.add);
    }
}

static __attribute__((noinline)) void multiply_few(
    const Matrix *m, const float *x, int64_t stride, int64_t rows, int64_t first, Target to) {
    if (rows == 1)
        multiply_vector(m, x, stride, 1, first, to);
    else if (rows == 2)
        multiply_vector(m, x, stride, 2, first, to);
    else if (rows == 3)
        multiply_vector(m, x, stride, 3, first, to);
    else
        multiply_vector(m, x, stride, 4, first, to);
}

/* Bytes that a thread needs for many rows of a product. */
INLINE int64_t strip_bytes(int64_t dims) {
    return (chain_dims(dims) + SOON) * FLOAT_STRIP * FLOAT_PANEL * sizeof(float);
}

/* Many rows times channels [first, end): FLOAT_STRIP panels at most. */
static __attribute__((noinline)) void multiply_strip(
    const Matrix *m, const float *x, int64_t stride, int64_t rows, int64_t first, int64_t end,
    Target to, float *turned) {
    float sums[FLOAT_TILE * FLOAT_PANEL] __attribute__((aligned(64)));
    int64_t dims = m->in_dim, length = chain_dims(dims);
    for (int64_t chain = 0; chain < dims; chain += length) {
        int64_t here = MIN(length, dims - chain);
        for (int64_t o = first; o < end; o += FLOAT_PANEL) {
            const float *w = m->weight + o * dims + chain;
            int64_t channels = MIN(FLOAT_PANEL, end - o);
            turn_weights(w, dims, here, channels, w + FLOAT_PANEL * dims,
                         turned + (o - first) * length);
        }
        for (int64_t r = 0; r < rows; r += FLOAT_TILE) {
            int64_t tile = MIN(FLOAT_TILE, rows - r);
            for (int64_t o = first; o < end; o += FLOAT_PANEL) {
                float *y = to.y + r * to.stride;
                for (int64_t n = 0; n < tile; n++) /* results come where nothing is near yet */
                    for (int i = 0; i < FLOAT_PANEL; i += LINE)
                        __builtin_prefetch(y + n * to.stride + o + i, 1);
                multiply_float_rows(turned + (o - first) * length, x + r * stride + chain, stride,
                                    here, tile, sums);
                for (int64_t n = 0; n < tile; n++)
                    join_panel(m, o, MIN(FLOAT_PANEL, end - o), sums + n * FLOAT_PANEL, chain == 0,
                               y + n * to.stride, to.add);
            }
        }
    }
}

/* `rows` rows times float32 weights, by all threads of a team: all is written when it returns.
 * `turned`: strip_bytes of each thread, for more than FEW_ROWS. */
static void multiply_floats(
    const Matrix *m, const float *x, int64_t stride, int64_t rows, Target to, int threads,
    float *turned) {
    if (rows <= 0) return;
    if (rows <= FEW_ROWS) {
#pragma omp for schedule(dynamic, 2)
        for (int64_t first = 0; first < m->out_dim; first += WIDTH)
            multiply_few(m, x, stride, rows, first, to);
        return;
    }
    int64_t panels = whole(m->out_dim, FLOAT_PANEL) / FLOAT_PANEL;
    int64_t chunks = whole(rows, FLOAT_CHUNK) / FLOAT_CHUNK;
    int64_t chunk = whole(whole(rows, chunks) / chunks, FLOAT_TILE);
    int64_t fair = panels * chunks / (4 * threads); /* several turns for every thread */
    int64_t strip = fair < 1 ? 1 : MIN(fair, FLOAT_STRIP);
    int64_t strips = whole(panels, strip) / strip;
#pragma omp for schedule(dynamic, 1)
    for (int64_t turn = 0; turn < strips * chunks; turn++) {
        int64_t first = turn % strips * strip * FLOAT_PANEL, row = turn / strips * chunk;
        if (row >= rows) continue;
        Target there = {to.y + row * to.stride, to.stride, to.add};
        multiply_strip(m, x + row * stride, stride, MIN(chunk, rows - row), first,
                       MIN(first + strip * FLOAT_PANEL, m->out_dim), there, turned);
    }
}

/* y [rows][out_dim] = x [rows][in_dim] times float32 weights, or += it; both with the stride of
 * their rows. Returns 0, or 1 where there was no memory: nothing is written then. */
int kvw_multiply_floats(
    const Matrix *m, const float *x, int64_t x_stride, float *y, int64_t y_stride, int64_t rows,
    int add, int threads) {
    if (rows <= 0 || m->out_dim <= 0) return 0;
    int64_t own = rows <= FEW_ROWS ? 0 : whole(strip_bytes(m->in_dim), 64);
    char *memory = malloc(threads * own + 64);
    if (memory == NULL) return 1;
    char *at = (char *)whole((int64_t)(intptr_t)memory, 64);
#pragma omp parallel num_threads(threads) if (threads > 1)
    multiply_floats(m, x, x_stride, rows, (Target){y, y_stride, add}, threads,
                    (float *)(at + omp_get_thread_num() * own));
    free(memory);
    return 0;
}
