/* ---- attention of one row ---- */

#define KEY_BLOCK 128 /* keys that are looked at together: how a row is cut, whatever the threads */
#define CHUNK 4       /* vectors of sums in registers */
#define MOST_DIM 256  /* of a head */

/* Keys and values of one sequence: slots of some memory. Strides are in floats. */
typedef struct {
    const float *keys, *values; /* of slot 0 */
    int64_t key_row, key_head, value_row, value_head;
    const int64_t *pieces; /* (first slot, slots) each, in position order; none: from slot 0 on */
    int64_t num_pieces;
} Held;

/* Some keys or values of one head. */
typedef struct {
    const float *at;
    int64_t row;
} Strip;

/* Numbers [start, start + count) of a head whose slot 0 is `base`: where they lie, or, in several
 * pieces, laid into `room` [count][dim]. */
static Strip strip_of(
    const Held *held, const float *base, int64_t row, int64_t start, int64_t count, int64_t dim,
    float *room) {
    if (held->pieces == NULL) return (Strip){base + start * row, row};
    int64_t done = 0;
    for (int64_t p = 0; p < held->num_pieces; p++) {
        int64_t slots = held->pieces[2 * p + 1];
        if (start >= slots) {
            start -= slots;
            continue;
        }
        const float *from = base + (held->pieces[2 * p] + start) * row;
        int64_t here = MIN(slots - start, count - done);
        if (here == count) return (Strip){from, row};
        for (int64_t n = 0; n < here; n++)
            memcpy(room + (done + n) * dim, from + n * row, dim * sizeof(float));
        done += here;
        start = 0;
        if (done == count) break;
    }
    return (Strip){room, dim};
}

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

/* A part: the largest score of some keys, the sum of their weights, the weighted sum of values. */
#define PART(dim) ((dim) + 2)

/* What the queries [group][dim] of KV head h find among `count` keys from number `first` on: a part
 * of each. */
static void attend_block(
    const float *q, const Held *held, int64_t h, int64_t first, int64_t count, int64_t group,
    int64_t dim, float scale, float *parts) {
    float key_room[KEY_BLOCK * MOST_DIM], value_room[KEY_BLOCK * MOST_DIM], scores[KEY_BLOCK];
    const float *head_keys = held->keys + h * held->key_head;
    const float *head_values = held->values + h * held->value_head;
    Strip keys = strip_of(held, head_keys, held->key_row, first, count, dim, key_room);
    Strip values = strip_of(held, head_values, held->value_row, first, count, dim, value_room);
    for (int64_t g = 0; g < group; g++, parts += PART(dim)) {
        float top = -INFINITY, total = 0.0f;
        for (int64_t n = 0; n < count; n++)
            scores[n] = scale * dot_floats(q + g * dim, keys.at + n * keys.row, dim);
        for (int64_t n = 0; n < count; n++) top = scores[n] > top ? scores[n] : top;
        for (int64_t n = 0; n < count; n++) scores[n] = exp_near(scores[n] - top);
        for (int64_t n = 0; n < count; n++) total += scores[n];
        parts[0] = top;
        parts[1] = total;
        weigh(scores, values.at, values.row, count, dim, parts + 2);
    }
}

/* The blocks' parts of one query, `step` floats apart, put together. */
static void join_parts(const float *parts, int64_t step, int64_t blocks, int64_t dim, float *to) {
    float top = -INFINITY, total = 0.0f;
    for (int64_t b = 0; b < blocks; b++)
        top = parts[b * step] > top ? parts[b * step] : top;
    for (int64_t i = 0; i < dim; i++) to[i] = 0.0f;
    for (int64_t b = 0; b < blocks; b++) {
        const float *part = parts + b * step;
        float weight = exp_near(part[0] - top);
        total += weight * part[1];
        for (int64_t i = 0; i < dim; i++) to[i] += weight * part[2 + i];
    }
    for (int64_t i = 0; i < dim; i++) to[i] /= total;
}

/* One row of queries [kv_heads * group][dim] over `keys` and `values` [num_keys][kv_heads][dim];
 * the queries of a KV head look at it together. Blocks of keys have a softmax each, and are put
 * together at the end. Returns 0, or 1 where there was no memory. */
int kvw_attend_row(
    const float *q, const float *keys, int64_t key_row, int64_t key_head, const float *values,
    int64_t value_row, int64_t value_head, float *out, int64_t num_keys, int64_t kv_heads,
    int64_t group, int64_t dim, float scale, int threads) {
    int64_t blocks = whole(num_keys, KEY_BLOCK) / KEY_BLOCK, size = PART(dim);
    Held held = {keys, values, key_row, key_head, value_row, value_head, NULL, 0};
    float *parts = malloc(blocks * kv_heads * group * size * sizeof(float));
    if (parts == NULL) return 1;
    int is_large = threads > 1 && num_keys * kv_heads * dim > PARALLEL_VALUES;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (is_large)
    for (int64_t turn = 0; turn < blocks * kv_heads; turn++) {
        int64_t first = turn / kv_heads * KEY_BLOCK, h = turn % kv_heads;
        int64_t count = MIN(KEY_BLOCK, num_keys - first);
        float *part = parts + turn * group * size;
        attend_block(q + h * group * dim, &held, h, first, count, group, dim, scale, part);
    }
    for (int64_t head = 0; head < kv_heads * group; head++)
        join_parts(parts + head * size, kv_heads * group * size, blocks, dim, out + head * dim);
    free(parts);
    return 0;
}
