/* ---- products with rounded weights ----
 *
 * Weights of a product lie in panels: PANEL output channels, and of these four columns at a time,
 * so that one load is what one instruction multiplies with four integers of a row:
 *
 *     packed [panels][columns / 4][PANEL][4]
 */

#define PANEL (LANES * TILE_VECS) /* channels */
#define BLOCK_ROWS (8 * TILE_ROWS) /* rows whose codes stay near while panels pass by */
#define PANEL_BYTES (192 << 10)     /* of panels that a thread takes at a time */
#define CHUNK_ROWS 1536             /* rows whose codes are in memory at a time */
#define FEW_ROWS 4                  /* rounded by the caller's thread: waiting would cost more */
#define AHEAD 2048                  /* bytes of weights that are asked for ahead */

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

int64_t kvw_padded_channels(int64_t out_dim) { return whole(out_dim, PANEL); }

/* codes [out_dim][columns] into panels, and what the sums of every channel begin with. Both are
 * for kvw_padded_channels; columns are filled up to whole groups with zeros. */
void kvw_pack(
    const int8_t *codes, int64_t out_dim, int64_t columns, int8_t *packed, int32_t *start) {
    int64_t width = whole(columns, GROUP);
#pragma omp parallel for schedule(static, PANEL)
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
static __attribute__((noinline)) float round_row(const Product *p, const float *restrict x, Code *restrict codes) {
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
static __attribute__((noinline)) void write_row(
    const Product *p, int64_t first, const int32_t *sums, float row_scale, float *y, int add) {
    float done[PANEL];
    int64_t count = MIN(PANEL, p->out_dim - first);
    float *to = count < PANEL ? done : y + first;
#pragma GCC unroll 8
    for (int i = 0; i < PANEL; i += WIDTH) {
        IntVec whole_sums;
        memcpy(&whole_sums, sums + i, sizeof whole_sums);
        Vec values = __builtin_convertvector(whole_sums, Vec);
        values = values * load_vec(p->scale + first + i) * row_scale;
        if (p->bias) values += load_vec(p->bias + first + i);
        if (add && count == PANEL) values += load_vec(to + i);
        memcpy(to + i, &values, sizeof values);
    }
    if (count < PANEL)
        for (int64_t i = 0; i < count; i++) y[first + i] = add ? y[first + i] + done[i] : done[i];
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
    int64_t c = 0;
#ifdef LANE_GROUPS
#define ADD_GROUP(n)                                                                               \
    {                                                                                              \
        __builtin_prefetch(w + AHEAD);                                                             \
        Weights held = weights_at(w);                                                              \
        for (int r = 0; r < rows; r++) ADD_LANE(sums[r][0], x[r], n, held)                         \
        w += PANEL * GROUP;                                                                        \
    }
    for (; c + LANE_GROUPS * GROUP <= width; c += LANE_GROUPS * GROUP) {
        Four x[TILE_ROWS];
        for (int r = 0; r < rows; r++) x[r] = lanes_at(codes + r * width + c);
        ADD_GROUP(0) ADD_GROUP(1) ADD_GROUP(2) ADD_GROUP(3)
    }
#undef ADD_GROUP
#endif
    for (; c < width; c += GROUP, w += PANEL * GROUP) {
        Weights held[TILE_VECS];
#pragma GCC unroll 2
        for (int v = 0; v < TILE_VECS; v++) {
            __builtin_prefetch(w + v * LANES * GROUP + AHEAD);
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
        for (int64_t r = 0; r < left; r++) /* results come where nothing is near yet */
            for (int v = 0; v < TILE_VECS; v++)
                __builtin_prefetch(to.y + (row + r) * to.stride + first + v * LANES, 1);
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

#include "amx.h"

const char *kvw_kind(void) { return has_squares ? KIND " and AMX" : KIND; }

/* Rows in integers, and the scale of each. */
typedef struct {
    Code *codes; /* [rows][columns to whole groups], with room behind for a whole tile */
    float *scale;
} RoundedRows;

/* What rounded rows of a product take: what fills a tile up is never used. */
static int64_t codes_bytes(int64_t rows, int64_t columns) {
    int64_t width = whole(columns, GROUP);
    return ((rows + SQUARE_ROWS) * width + SQUARE_COLUMNS) * (int64_t)sizeof(Code);
}

/* `count` rounded rows times all panels. Every thread of a team calls this; all is written when it
 * returns. */
static void multiply_rounded(
    const Product *p, RoundedRows rows, int64_t count, Target to, int threads) {
    int64_t width = whole(p->columns, GROUP), panels = whole(p->out_dim, PANEL) / PANEL;
    int64_t blocks = whole(count, BLOCK_ROWS) / BLOCK_ROWS;
    /* as many panels at a time as stay near, but several turns for every thread */
    int64_t near = PANEL_BYTES / (PANEL * width), fair = panels * blocks / (4 * threads);
    int64_t step = MIN(near, fair);
    step = step < 1 ? 1 : step;
    int64_t steps = whole(panels, step) / step;
    int in_squares = has_squares && count >= LEAST_SQUARE_ROWS;
    if (in_squares) enter_squares();
#pragma omp for schedule(dynamic, 1)
    for (int64_t turn = 0; turn < blocks * steps; turn++) {
        int64_t first = turn / steps * BLOCK_ROWS, start = turn % steps * step;
        int64_t end = MIN(first + BLOCK_ROWS, count);
        for (int64_t n = start; n < MIN(start + step, panels); n++)
            if (in_squares)
                multiply_panel_squares(p, n, rows.codes, rows.scale, first, end, to);
            else
                multiply_panel(p, n, rows.codes, rows.scale, first, end, to);
    }
    if (in_squares) leave_squares();
}

/* y [rows][out_dim] = x [rows][in_dim] times the weights, or += it; both with the stride of their
 * rows. Returns 0, or 1 where there was no memory: nothing is written then. */
int kvw_multiply(
    const Product *p, const float *x, int64_t x_stride, float *y, int64_t y_stride, int64_t rows,
    int add, int threads) {
    if (rows <= 0 || p->out_dim <= 0) return 0;
    int64_t width = whole(p->columns, GROUP), most = MIN(rows, CHUNK_ROWS);
    RoundedRows held = {malloc(codes_bytes(most, width)), malloc(most * sizeof(float))};
    if (held.codes == NULL || held.scale == NULL) {
        free(held.codes);
        free(held.scale);
        return 1;
    }
    for (int64_t done = 0; done < rows; done += CHUNK_ROWS) {
        int64_t count = MIN(rows - done, CHUNK_ROWS);
        const float *from = x + done * x_stride;
        Target to = {y + done * y_stride, y_stride, add};
        if (count <= FEW_ROWS)
            for (int64_t r = 0; r < count; r++)
                held.scale[r] = round_row(p, from + r * x_stride, held.codes + r * width);
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            if (count > FEW_ROWS) {
#pragma omp for schedule(static)
                for (int64_t r = 0; r < count; r++)
                    held.scale[r] = round_row(p, from + r * x_stride, held.codes + r * width);
            }
            multiply_rounded(p, held, count, to, threads);
        }
    }
    free(held.codes);
    free(held.scale);
    return 0;
}
