/* ---- attention of one row ----
 *
 * What a row finds has one order of additions, here and among many rows (many_rows.h), so that it
 * does not depend on what is computed beside it, to the last bit:
 *
 *     a score    dims one after the other
 *     a part     PART_KEYS keys: blocks of KEYS keys from a running softmax, a block key by key
 *     a row      its parts, one after the other
 */

#define KEYS 64       /* that are looked at together */
#define PART_KEYS 256 /* of a part: threads may share a row, part by part */
#define CHUNK 4       /* vectors of sums in registers */
#define MOST_DIM 256  /* of a head */
#define MOST_GROUP 16 /* query heads of a KV head that look at keys together */
#define TILES 8       /* most that look at keys one after the other while these are near */
#define HIDDEN -1e30f /* score of a key that a row does not see */

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

/* sums [dim] += weights [count] times values [count][dim] with a stride */
static void weigh(
    const float *weights, const float *values, int64_t stride, int64_t count, int64_t dim,
    float *sums) {
    int64_t i = 0;
    for (; i + CHUNK * WIDTH <= dim; i += CHUNK * WIDTH) {
        Vec held[CHUNK];
        memcpy(held, sums + i, sizeof held);
        for (int64_t n = 0; n < count; n++)
#pragma GCC unroll 4
            for (int v = 0; v < CHUNK; v++)
                held[v] += load_vec(values + n * stride + i + v * WIDTH) * weights[n];
        memcpy(sums + i, held, sizeof held);
    }
    for (; i < dim; i += WIDTH) { /* never by single numbers: their products would be rounded */
        int64_t bytes = MIN(WIDTH, dim - i) * (int64_t)sizeof(float);
        Vec held = {0}, value = {0};
        memcpy(&held, sums + i, bytes);
        for (int64_t n = 0; n < count; n++) {
            memcpy(&value, values + n * stride + i, bytes);
            held += value * weights[n];
        }
        memcpy(sums + i, &held, bytes);
    }
}

typedef float Quad __attribute__((vector_size(16)));

/* `count` keys [dim] with a stride as [dim][WIDTH]; the last one stands in for those that lack. */
static void turn_keys(
    const float *keys, int64_t stride, int64_t count, int64_t dim, float *turned) {
    for (int64_t n = 0; n < WIDTH; n += 4) {
        const float *of[4];
        for (int k = 0; k < 4; k++) of[k] = keys + MIN(n + k, count - 1) * stride;
        int64_t i = 0;
        for (; i + 4 <= dim; i += 4) {
            Quad a, b, c, d;
            memcpy(&a, of[0] + i, sizeof a);
            memcpy(&b, of[1] + i, sizeof b);
            memcpy(&c, of[2] + i, sizeof c);
            memcpy(&d, of[3] + i, sizeof d);
            Quad ab = __builtin_shufflevector(a, b, 0, 4, 1, 5);
            Quad cd = __builtin_shufflevector(c, d, 0, 4, 1, 5);
            Quad ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
            Quad cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
            Quad four[4] = {__builtin_shufflevector(ab, cd, 0, 1, 4, 5),
                            __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
                            __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5),
                            __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7)};
            for (int k = 0; k < 4; k++)
                memcpy(turned + (i + k) * WIDTH + n, four + k, sizeof four[k]);
        }
        for (; i < dim; i++)
            for (int k = 0; k < 4; k++) turned[i * WIDTH + n + k] = of[k][i];
    }
}

/* scores [group][KEYS] of `count` keys; queries [group][dim] are scaled. */
static void score_keys(
    const float *q, Strip keys, int64_t count, int64_t group, int64_t dim, float *scores) {
    float turned[MOST_DIM * WIDTH] __attribute__((aligned(64)));
    for (int64_t n = 0; n < count; n += WIDTH) {
        turn_keys(keys.at + n * keys.row, keys.row, MIN(WIDTH, count - n), dim, turned);
        for (int64_t g = 0; g < group; g++) {
            Vec sums = {0};
            for (int64_t i = 0; i < dim; i++) sums += load_vec(turned + i * WIDTH) * q[g * dim + i];
            memcpy(scores + g * KEYS + n, &sums, sizeof sums);
        }
    }
}

/* A part: the largest score of its keys, the sum of their weights, the weighted sum of values. */
#define PART(dim) ((dim) + 2)

/* What the queries [group][dim] of KV head h find among `count` keys from number `first` on: a part
 * of each. */
static void attend_part(
    const float *q, const Held *held, int64_t h, int64_t first, int64_t count, int64_t group,
    int64_t dim, float scale, float *parts) {
    if (group > MOST_GROUP) {
        int64_t more = group - MOST_GROUP;
        const float *others = q + MOST_GROUP * dim;
        attend_part(others, held, h, first, count, more, dim, scale, parts + MOST_GROUP * PART(dim));
        group = MOST_GROUP;
    }
    float scaled[MOST_GROUP * MOST_DIM], scores[MOST_GROUP * KEYS];
    float key_room[KEYS * MOST_DIM], value_room[KEYS * MOST_DIM];
    const float *head_keys = held->keys + h * held->key_head;
    const float *head_values = held->values + h * held->value_head;
    for (int64_t n = 0; n < group * dim; n++) scaled[n] = q[n] * scale;
    for (int64_t g = 0; g < group; g++) {
        memset(parts + g * PART(dim), 0, PART(dim) * sizeof(float));
        parts[g * PART(dim)] = HIDDEN;
    }
    for (int64_t start = first; start < first + count; start += KEYS) {
        int64_t here = MIN(KEYS, first + count - start);
        Strip keys = strip_of(held, head_keys, held->key_row, start, here, dim, key_room);
        Strip values = strip_of(held, head_values, held->value_row, start, here, dim, value_room);
        score_keys(scaled, keys, here, group, dim, scores);
        for (int64_t g = 0; g < group; g++) {
            float *part = parts + g * PART(dim), *weights = scores + g * KEYS;
            float top = part[0], total = 0.0f;
            for (int64_t n = 0; n < here; n++) top = weights[n] > top ? weights[n] : top;
            for (int64_t n = 0; n < here; n++) weights[n] = exp_below(weights[n] - top);
            for (int64_t n = 0; n < here; n++) total += weights[n];
            float fade = exp_below(part[0] - top);
            part[0] = top;
            part[1] = part[1] * fade + total;
            for (int64_t i = 0; i < dim; i++) part[2 + i] *= fade;
            weigh(weights, values.at, values.row, here, dim, part + 2);
        }
    }
}

/* totals [lanes] and sums [dim][lanes] count for `fade` of what they did. Never inlined: beside the
 * sums that follow, the compiler would choose which of two products it rounds. */
static __attribute__((noinline)) void fade_lanes(
    float *total, float *sums, const float *fade, int64_t dim, int64_t lanes) {
    for (int64_t n = 0; n < lanes; n++) total[n] *= fade[n];
    for (int64_t i = 0; i < dim; i++)
        for (int64_t n = 0; n < lanes; n++) sums[i * lanes + n] *= fade[n];
}

/* A further part joins those before it, for some lanes: tops and totals [lanes], sums [dim][lanes].
 * The part's totals and sums are written over. */
static void join_part(
    float *top, float *total, float *sums, const float *part_top, float *part_total,
    float *part_sums, int64_t dim, int64_t lanes) {
    float fade[QUERIES], part_fade[QUERIES];
    for (int64_t n = 0; n < lanes; n++) {
        float now = part_top[n] > top[n] ? part_top[n] : top[n];
        fade[n] = exp_below(top[n] - now);
        part_fade[n] = exp_below(part_top[n] - now);
        top[n] = now;
    }
    fade_lanes(part_total, part_sums, part_fade, dim, lanes);
    for (int64_t n = 0; n < lanes; n++) total[n] = total[n] * fade[n] + part_total[n];
    for (int64_t i = 0; i < dim; i++)
        for (int64_t n = 0; n < lanes; n++)
            sums[i * lanes + n] = sums[i * lanes + n] * fade[n] + part_sums[i * lanes + n];
}

/* The parts of one query, `step` floats apart, put together. They are written over. */
static void join_parts(float *parts, int64_t step, int64_t count, int64_t dim, float *to) {
    for (int64_t b = 1; b < count; b++) {
        float *part = parts + b * step;
        join_part(parts, parts + 1, parts + 2, part, part + 1, part + 2, dim, 1);
    }
    float share = 1.0f / parts[1];
    for (int64_t i = 0; i < dim; i++) to[i] = parts[2 + i] * share;
}
