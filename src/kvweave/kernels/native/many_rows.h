/* ---- attention of many rows ---- */

/* Queries lie across the lanes of vectors, keys and dims go along memory: then the softmax of a row
 * stays in its lane, and nothing is ever added up across lanes. What a lane computes does not
 * depend on the lanes beside it. */

#if defined(__ARM_NEON)
/* One load brings four numbers of a, and vectors are multiplied by one lane of it: to fill a
 * register with each number would take a place among the products. Returns how deep it went. */
INLINE int64_t multiply_by_lanes(
    const float *a, int64_t a_row, int64_t a_depth, const float *b, Vec sums[DEEP][VECS],
    int64_t depth) {
    int64_t k = 0;
    float32x4_t held[VECS];
/* loads stay where they are: the compiler would bring all of them forward, and push sums out */
#define HOLD(depth)                                                                                \
    __asm__ volatile("" ::: "memory");                                                             \
    for (int v = 0; v < VECS; v++) held[v] = vld1q_f32(b + (depth) * QUERIES + v * WIDTH);
#define ADD_ROW(r, of, lane)                                                                       \
    for (int v = 0; v < VECS; v++)                                                                 \
        sums[r][v] = (Vec)vfmaq_laneq_f32((float32x4_t)sums[r][v], held[v], of, lane);
#define ADD_DEPTH(i)                                                                               \
    HOLD(k + i) ADD_ROW(0, of[0], i) ADD_ROW(1, of[1], i) ADD_ROW(2, of[2], i) ADD_ROW(3, of[3], i)
    if (a_depth == 1) {
        for (; k + 4 <= depth; k += 4) {
            float32x4_t of[DEEP];
            for (int r = 0; r < DEEP; r++) of[r] = vld1q_f32(a + r * a_row + k);
            ADD_DEPTH(0) ADD_DEPTH(1) ADD_DEPTH(2) ADD_DEPTH(3)
        }
    } else if (a_row == 1) {
        for (; k < depth; k++) {
            float32x4_t of = vld1q_f32(a + k * a_depth);
            HOLD(k) ADD_ROW(0, of, 0) ADD_ROW(1, of, 1) ADD_ROW(2, of, 2) ADD_ROW(3, of, 3)
        }
    }
    return k;
#undef HOLD
#undef ADD_ROW
#undef ADD_DEPTH
}
#endif

/* out [rows][QUERIES] (+)= sum over k of a [rows][depth] (strides) times b [depth][QUERIES], for
 * `vecs` vectors of lanes; rows and vecs are constants where this is inlined. */
INLINE void small_product(
    const float *a, int64_t a_row, int64_t a_depth, const float *b, float *out, const int rows,
    const int vecs, int64_t depth, int add) {
    Vec sums[DEEP][VECS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++)
            sums[r][v] = add ? load_vec(out + r * QUERIES + v * WIDTH) : (Vec){0};
    int64_t k = 0;
#if defined(__ARM_NEON)
    if (rows == DEEP && vecs == VECS) k = multiply_by_lanes(a, a_row, a_depth, b, sums, depth);
#endif
    for (; k < depth; k++) {
        Vec held[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++) held[v] = load_vec(b + k * QUERIES + v * WIDTH);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vecs; v++) sums[r][v] += held[v] * a[r * a_row + k * a_depth];
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vecs; v++)
            memcpy(out + r * QUERIES + v * WIDTH, &sums[r][v], sizeof(Vec));
}

/* The same for any number of rows. */
INLINE void long_product(
    const float *a, int64_t a_row, int64_t a_depth, const float *b, float *out, int64_t rows,
    const int vecs, int64_t depth, int add) {
    int64_t r = 0;
    if (a_depth == 1) /* a constant for what is inlined */
        for (; r + DEEP <= rows; r += DEEP)
            small_product(a + r * a_row, a_row, 1, b, out + r * QUERIES, DEEP, vecs, depth, add);
    else
        for (; r + DEEP <= rows; r += DEEP)
            small_product(a + r, 1, a_depth, b, out + r * QUERIES, DEEP, vecs, depth, add);
    for (; r < rows; r++)
        small_product(a + r * a_row, a_row, a_depth, b, out + r * QUERIES, 1, vecs, depth, add);
}

/* The same for the first `lanes`, and what fills a vector up. */
static void product(
    const float *a, int64_t a_row, int64_t a_depth, const float *b, float *out, int64_t rows,
    int64_t lanes, int64_t depth, int add) {
    int64_t n = 0;
    for (; n + VECS * WIDTH <= whole(lanes, WIDTH); n += VECS * WIDTH)
        long_product(a, a_row, a_depth, b + n, out + n, rows, VECS, depth, add);
    for (; n < lanes; n += WIDTH)
        long_product(a, a_row, a_depth, b + n, out + n, rows, 1, depth, add);
}

typedef struct {
    const float *q;
    int64_t q_row, q_head;
    const int64_t *positions; /* of the rows, ascending: a row sees the keys up to its own */
    Held held;
    float *out; /* heads lie side by side; it may be where the queries are */
    int64_t out_row;
    int64_t rows, kv_heads, group, dim;
    float scale;
} Attention;

/* `value` for the scores or the weights of key k where lanes do not see it. */
INLINE void hide(float *lanes, const int32_t *left, int64_t k, float value) {
    for (int n = 0; n < QUERIES; n += WIDTH) {
        IntVec seen, there;
        memcpy(&seen, left + n, sizeof seen);
        memcpy(&there, lanes + n, sizeof there);
        seen = seen > (int32_t)k;
        there = (there & seen) | ((IntVec)((Vec){0} + value) & ~seen);
        memcpy(lanes + n, &there, sizeof there);
    }
}

#define LANE_VECS (QUERIES / WIDTH)

/* The largest of `top` and the scores [count][lanes], by lane. */
static void find_tops(const float *scores, int64_t count, const float *top, float *now) {
    Vec most[2][LANE_VECS]; /* of every other key: one alone would wait for itself */
    for (int v = 0; v < LANE_VECS; v++) most[0][v] = most[1][v] = load_vec(top + v * WIDTH);
    for (int64_t k = 0; k < count; k += 2)
#pragma GCC unroll 8
        for (int v = 0; v < LANE_VECS; v++) {
            const float *score = scores + k * QUERIES + v * WIDTH;
            most[0][v] = larger(load_vec(score), most[0][v]);
            if (k + 1 < count) most[1][v] = larger(load_vec(score + QUERIES), most[1][v]);
        }
    for (int v = 0; v < LANE_VECS; v++) most[0][v] = larger(most[1][v], most[0][v]);
    memcpy(now, most[0], sizeof most[0]);
}

/* Scores [count][lanes] become weights. `top` and `total` go on; what was summed before counts for
 * `fade` of what it did, if this returns 1, else for as much. `left`: keys that lanes see, if some
 * do not see all. */
static int weigh_scores(
    float *weights, int64_t count, float *top, float *total, float *fade, const int32_t *left) {
    Vec sum[LANE_VECS] = {{0}};
    float now[QUERIES];
    int moved = 0;
    int64_t edge = left == NULL ? count : left[0] > 0 ? left[0] : 0; /* all lanes see those before */
    for (int64_t k = edge; k < count; k++) hide(weights + k * QUERIES, left, k, HIDDEN);
    find_tops(weights, count, top, now);
    for (int n = 0; n < QUERIES; n++) moved |= now[n] != top[n];
    for (int n = 0; n < QUERIES; n++) fade[n] = exp_below(top[n] - now[n]);
    memcpy(top, now, sizeof now);
    for (int64_t k = 0; k < count; k++) {
        float *lanes = weights + k * QUERIES;
        for (int n = 0; n < QUERIES; n++) lanes[n] = exp_below(lanes[n] - now[n]);
        if (k >= edge) hide(lanes, left, k, 0.0f); /* nothing at all, whatever the values are */
#pragma GCC unroll 8
        for (int v = 0; v < LANE_VECS; v++) sum[v] += load_vec(lanes + v * WIDTH);
    }
    memcpy(now, sum, sizeof now);
    for (int n = 0; n < QUERIES; n++) total[n] = total[n] * fade[n] + now[n];
    return moved;
}

/* What the lanes of a tile found among some keys. */
typedef struct {
    float sums[MOST_DIM * QUERIES] __attribute__((aligned(64))); /* of values [dim][lanes] */
    float top[QUERIES], total[QUERIES];
} LanesPart;

/* QUERIES lanes of a KV head: neighbouring rows, each with the query heads that share it. */
typedef struct {
    float turned[MOST_DIM * QUERIES] __attribute__((aligned(64))); /* queries [dim][lanes] */
    int64_t lanes;         /* that are queries; those behind them repeat the last one's keys */
    int64_t seen[QUERIES]; /* keys that a lane sees from the start on, the last one most */
    LanesPart found;
} Tile;

/* A part of the keys and values of a head: [start, end), block by block. */
typedef struct {
    int64_t start, end;
    Strip keys[PART_KEYS / KEYS], values[PART_KEYS / KEYS];
} HeadPart;

/* What a thread needs for TILES tiles, which look at a part one after the other while it is near.
 * Of what stands here for MOST_DIM dims, no more is touched than there are. */
typedef struct {
    Tile tiles[TILES];
    LanesPart more;
    float weights[KEYS * QUERIES] __attribute__((aligned(64))); /* [keys][lanes] */
    float keys[PART_KEYS * MOST_DIM], values[PART_KEYS * MOST_DIM]; /* in several pieces */
} TilesRoom;

/* What a tile finds among the keys of a part, as far as it sees them. */
static void attend_tile_part(
    const Tile *tile, const HeadPart *part, int64_t dim, float *weights, LanesPart *found) {
    float fade[QUERIES];
    int32_t left[QUERIES]; /* keys of a block that a lane sees */
    const int64_t *seen = tile->seen;
    int64_t end = MIN(part->end, seen[QUERIES - 1]);
    memset(found->total, 0, sizeof found->total);
    for (int n = 0; n < QUERIES; n++) found->top[n] = HIDDEN;
    for (int64_t start = part->start, b = 0; start < end; start += KEYS, b++) {
        int64_t count = MIN(KEYS, end - start);
        int is_edge = start + count > seen[0]; /* some lanes do not see all of these */
        for (int n = 0; n < QUERIES; n++) left[n] = (int32_t)MIN(seen[n] - start, KEYS);
        Strip keys = part->keys[b], values = part->values[b];
        product(keys.at, keys.row, 1, tile->turned, weights, count, tile->lanes, dim, 0);
        int moved = weigh_scores(
            weights, count, found->top, found->total, fade, is_edge ? left : NULL);
        if (moved && b > 0)
            for (int64_t i = 0; i < dim; i++)
                for (int n = 0; n < QUERIES; n++) found->sums[i * QUERIES + n] *= fade[n];
        product(values.at, 1, values.row, weights, found->sums, dim, tile->lanes, count, b > 0);
    }
}

/* Tile `nth` of KV head h: lane n is query head n % group of row n / group. */
static void fill_tile(const Attention *t, int64_t h, int64_t nth, Tile *tile) {
    int64_t first = nth * QUERIES, last = t->rows * t->group - 1;
    tile->lanes = MIN(QUERIES, last + 1 - first);
    for (int64_t n = 0; n < QUERIES; n++) {
        int64_t at = MIN(first + n, last);
        const float *q = t->q + at / t->group * t->q_row;
        q += (h * t->group + at % t->group) * t->q_head;
        for (int64_t i = 0; i < t->dim; i++) tile->turned[i * QUERIES + n] = q[i] * t->scale;
        tile->seen[n] = t->positions[at / t->group] + 1;
    }
}

/* What tile `nth` found, where it belongs. */
static void write_tile(const Attention *t, int64_t h, int64_t nth, Tile *tile) {
    LanesPart *all = &tile->found;
    int64_t first = nth * QUERIES, lanes = tile->lanes, dim = t->dim;
    for (int n = 0; n < QUERIES; n++) all->total[n] = 1.0f / all->total[n];
    for (int64_t i = 0; i < dim; i++)
        for (int n = 0; n < QUERIES; n++) all->sums[i * QUERIES + n] *= all->total[n];
    for (int64_t n = 0; n < lanes; n++) {
        int64_t row = (first + n) / t->group, head = h * t->group + (first + n) % t->group;
        float *out = t->out + row * t->out_row + head * dim;
        for (int64_t i = 0; i < dim; i++) out[i] = all->sums[i * QUERIES + n];
    }
}

/* Keys and values [start, end) of KV head h. */
static void find_part(
    const Attention *t, int64_t h, int64_t start, int64_t end, TilesRoom *room, HeadPart *part) {
    const Held *held = &t->held;
    const float *keys = held->keys + h * held->key_head;
    const float *values = held->values + h * held->value_head;
    part->start = start;
    part->end = end;
    for (int64_t b = 0; start < end; b++, start += KEYS) {
        int64_t count = MIN(KEYS, end - start), at = b * KEYS * t->dim;
        part->keys[b] = strip_of(held, keys, held->key_row, start, count, t->dim, room->keys + at);
        part->values[b] = strip_of(
            held, values, held->value_row, start, count, t->dim, room->values + at);
    }
}

/* `count` tiles of KV head h from the nth on, TILES at most. */
static void attend_tiles(
    const Attention *t, int64_t h, int64_t nth, int64_t count, TilesRoom *room) {
    for (int64_t n = 0; n < count; n++) fill_tile(t, h, nth + n, room->tiles + n);
    int64_t end = room->tiles[count - 1].seen[QUERIES - 1], dim = t->dim;
    for (int64_t start = 0; start < end; start += PART_KEYS) {
        HeadPart part;
        find_part(t, h, start, MIN(start + PART_KEYS, end), room, &part);
        for (int64_t n = 0; n < count; n++) {
            Tile *tile = room->tiles + n;
            if (start >= tile->seen[QUERIES - 1]) continue; /* rows ascend: others see it */
            LanesPart *all = &tile->found, *more = start == 0 ? all : &room->more;
            attend_tile_part(tile, &part, dim, room->weights, more);
            if (start > 0)
                join_part(
                    all->top, all->total, all->sums, more->top, more->total, more->sums, dim,
                    QUERIES);
        }
    }
    for (int64_t n = 0; n < count; n++) write_tile(t, h, nth + n, room->tiles + n);
}

static int64_t tiles_of(int64_t rows, int64_t group) {
    return whole(rows * group, QUERIES) / QUERIES;
}

/* Tiles of a task: as many as look at keys together, but several tasks for every thread. */
static int64_t tiles_together(int64_t tiles, int threads) {
    int64_t fair = tiles / (8 * threads);
    return fair < 1 ? 1 : MIN(fair, TILES);
}

/* A single row: threads share it part by part. Returns 0, or 1 where there was no memory. */
static int attend_row(const Attention *t, int threads) {
    int64_t keys = t->positions[0] + 1, heads = t->kv_heads * t->group;
    int64_t parts = whole(keys, PART_KEYS) / PART_KEYS, size = PART(t->dim);
    float *found = malloc(parts * heads * size * sizeof(float));
    if (found == NULL) return 1;
    int is_large = threads > 1 && keys * t->kv_heads * t->dim > PARALLEL_VALUES;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (is_large)
    for (int64_t turn = 0; turn < parts * t->kv_heads; turn++) {
        int64_t first = turn / t->kv_heads * PART_KEYS, h = turn % t->kv_heads;
        const float *q = t->q + h * t->group * t->q_head;
        attend_part(
            q, &t->held, h, first, MIN(PART_KEYS, keys - first), t->group, t->dim, t->scale,
            found + turn * t->group * size);
    }
    for (int64_t head = 0; head < heads; head++)
        join_parts(found + head * size, heads * size, parts, t->dim, t->out + head * t->dim);
    free(found);
    return 0;
}

/* Every row over the keys up to its position. dim is at most MOST_DIM (kvw_most_dim), and heads of
 * queries lie side by side. Returns 0, or 1 where there was no memory. */
int kvw_attend_rows(const Attention *t, int threads) {
    if (t->rows == 1) return attend_row(t, threads);
    int64_t tiles = tiles_of(t->rows, t->group);
    int64_t step = tiles_together(tiles * t->kv_heads, threads);
    int64_t turns = whole(tiles, step) / step;
    char *memory = malloc(threads * sizeof(TilesRoom) + 64);
    if (memory == NULL) return 1;
    TilesRoom *rooms = (TilesRoom *)whole((int64_t)(intptr_t)memory, 64);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (threads > 1)
    for (int64_t turn = 0; turn < turns * t->kv_heads; turn++) {
        /* the last rows see most: they go first, so that no thread is left with one at the end */
        int64_t nth = (turns - 1 - turn / t->kv_heads) * step;
        TilesRoom *room = rooms + omp_get_thread_num();
        attend_tiles(t, turn % t->kv_heads, nth, MIN(step, tiles - nth), room);
    }
    free(memory);
    return 0;
}

int64_t kvw_most_dim(void) { return MOST_DIM; }
