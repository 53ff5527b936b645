/* ---- whole layers ----
 *
 * A team of threads goes through the steps of a layer together, without being sent for anew at each
 * of them: few rows have little to do per step. Functions with a Team are called by all its threads.
 */

#ifdef _OPENMP
int omp_get_thread_num(void); /* not every compiler has omp.h */
#else
static int omp_get_thread_num(void) { return 0; }
#endif

/* Rows up to which float32 weights of a model without rounded ones are multiplied here: for more,
 * libraries are faster, and what a row gets there depends on how many there are. */
int64_t kvw_few_rows(void) { return FEW_ROWS; }

/* A product, rounded or as it is. */
typedef struct {
    const Product *rounded; /* none: float32 */
    const float *weight;    /* [out_dim][in_dim] */
    const float *bias;      /* [out_dim], or none */
    int64_t in_dim, out_dim;
} Matrix;

typedef struct {
    const float *input_norm, *mlp_norm; /* [hidden] */
    const float *q_norm, *k_norm;       /* [dim], or none */
    Matrix qkv, out, gate_up, down;
} Layer;

typedef struct {
    int64_t hidden, inner, heads, kv_heads, dim;
    int64_t half; /* pairs of dims that are turned */
    float eps, scale;
} Shape;

/* Memory of a team. */
typedef struct {
    const Shape *shape;
    int threads;
    RoundedRows shared; /* of all rows */
    char *own;          /* of each thread: rows as floats, their scales, their codes */
    int64_t own_bytes, widest, columns;
} Team;

#define ALIGNED(bytes) whole(bytes, 64)

/* Where the rows of a product come from. */
typedef enum { AS_THEY_ARE, NORMED, GATED } Step;
typedef struct {
    Step step;
    const float *x;
    int64_t stride;
    const float *weight; /* of the norm */
} Source;

/* Row r, in `room` unless it is ready where it lies. */
static const float *source_row(
    const Source *from, const Shape *shape, int64_t r, int64_t dim, float *room) {
    const float *x = from->x + r * from->stride;
    if (from->step == AS_THEY_ARE) return x;
    if (from->step == NORMED)
        norm_row(x, from->weight, shape->eps, room, dim);
    else
        gate_row(x, x + dim, room, dim);
    return room;
}

#define CHANNELS 32   /* of a float32 product that a thread takes at a time */
#define FLOAT_ROWS 64 /* of one that a thread takes at a time, where there are many */
#if defined(__AVX__) && !defined(__AVX512F__) /* sums of a tile are in registers, two for each */
#define DOT_ROWS 2
#define DOT_CHANNELS 2
#else
#define DOT_ROWS 4
#define DOT_CHANNELS 3
#endif

/* The dots of DOT_ROWS rows and DOT_CHANNELS channels, each in the order of dot_floats. */
static void dot_tile(
    const float *w, const float *x, int64_t stride, int64_t count,
    float sums[DOT_ROWS][DOT_CHANNELS]) {
    Vec even[DOT_ROWS][DOT_CHANNELS] = {{{0}}}, odd[DOT_ROWS][DOT_CHANNELS] = {{{0}}};
    int64_t i = 0;
#define ADD_DOTS(to, at)                                                                           \
    {                                                                                              \
        Vec of_w[DOT_CHANNELS];                                                                    \
        for (int c = 0; c < DOT_CHANNELS; c++) of_w[c] = load_vec(w + c * count + (at));           \
        for (int r = 0; r < DOT_ROWS; r++) {                                                       \
            Vec of_x = load_vec(x + r * stride + (at));                                            \
            for (int c = 0; c < DOT_CHANNELS; c++) to[r][c] += of_w[c] * of_x;                     \
        }                                                                                          \
    }
    for (; i + 2 * WIDTH <= count; i += 2 * WIDTH) {
        ADD_DOTS(even, i)
        ADD_DOTS(odd, i + WIDTH)
    }
#undef ADD_DOTS
    for (; i < count; i += WIDTH) {
        int64_t bytes = MIN(WIDTH, count - i) * (int64_t)sizeof(float);
        for (int r = 0; r < DOT_ROWS; r++)
            for (int c = 0; c < DOT_CHANNELS; c++) {
                Vec of_w = {0}, of_x = {0};
                memcpy(&of_w, w + c * count + i, bytes);
                memcpy(&of_x, x + r * stride + i, bytes);
                even[r][c] += of_w * of_x;
            }
    }
    for (int r = 0; r < DOT_ROWS; r++)
        for (int c = 0; c < DOT_CHANNELS; c++) sums[r][c] = sum_lanes(even[r][c] + odd[r][c]);
}

INLINE void put_dot(const Matrix *m, Target to, int64_t r, int64_t o, float sum) {
    float *y = to.y + r * to.stride + o;
    if (m->bias) sum += m->bias[o];
    *y = to.add ? *y + sum : sum;
}

/* Channels [first, end) of some rows times float32 weights: a dot has one order, whatever the tile. */
static void multiply_floats(
    const Matrix *m, const float *x, int64_t stride, int64_t count, int64_t first, int64_t end,
    Target to) {
    int64_t o = first, dims = m->in_dim;
    for (; count >= DOT_ROWS && o + DOT_CHANNELS <= end; o += DOT_CHANNELS) {
        const float *w = m->weight + o * dims; /* stays near while rows pass by */
        int64_t r = 0;
        for (; r + DOT_ROWS <= count; r += DOT_ROWS) {
            float sums[DOT_ROWS][DOT_CHANNELS];
            dot_tile(w, x + r * stride, stride, dims, sums);
            for (int i = 0; i < DOT_ROWS; i++)
                for (int c = 0; c < DOT_CHANNELS; c++) put_dot(m, to, r + i, o + c, sums[i][c]);
        }
        for (; r < count; r++)
            for (int c = 0; c < DOT_CHANNELS; c++)
                put_dot(m, to, r, o + c, dot_floats(w + c * dims, x + r * stride, dims));
    }
    for (; o < end; o++)
        for (int64_t r = 0; r < count; r++)
            put_dot(m, to, r, o, dot_floats(m->weight + o * dims, x + r * stride, dims));
}

/* Rows times float32 weights, by a team. Few rows are made by every thread, which takes some
 * channels: waiting would cost more. Of many it takes some rows, and all channels. */
static void project_floats(
    const Team *team, const Matrix *m, Source from, int64_t count, Target to, float *room) {
    if (count <= FEW_ROWS) {
        const float *x = from.x;
        int64_t stride = from.stride;
        if (from.step != AS_THEY_ARE) {
            for (int64_t r = 0; r < count; r++)
                source_row(&from, team->shape, r, m->in_dim, room + r * team->widest);
            x = room;
            stride = team->widest;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t first = 0; first < m->out_dim; first += CHANNELS)
            multiply_floats(m, x, stride, count, first, MIN(first + CHANNELS, m->out_dim), to);
        return;
    }
    int64_t fair = whole(count, 2 * team->threads) / (2 * team->threads);
    int64_t step = MIN(FLOAT_ROWS, whole(fair, DOT_ROWS));
#pragma omp for schedule(dynamic, 1)
    for (int64_t first = 0; first < count; first += step) {
        int64_t here = MIN(step, count - first);
        const float *x = from.x + first * from.stride;
        int64_t stride = from.stride;
        if (from.step != AS_THEY_ARE) {
            for (int64_t r = 0; r < here; r++)
                source_row(&from, team->shape, first + r, m->in_dim, room + r * team->widest);
            x = room;
            stride = team->widest;
        }
        Target there = {to.y + first * to.stride, to.stride, to.add};
        multiply_floats(m, x, stride, here, 0, m->out_dim, there);
    }
}

/* `count` rows through a product. All is written when it returns. */
static void project(const Team *team, const Matrix *m, Source from, int64_t count, Target to) {
    float *room = (float *)(team->own + omp_get_thread_num() * team->own_bytes);
    int64_t widest = team->widest;
    if (m->rounded == NULL) {
        project_floats(team, m, from, count, to, room);
        return;
    }
    const Product *p = m->rounded;
    int64_t width = whole(p->columns, GROUP);
    RoundedRows rows = team->shared;
    if (count <= FEW_ROWS) {
        rows.scale = room + FEW_ROWS * widest;
        rows.codes = (Code *)(rows.scale + LANES);
        for (int64_t r = 0; r < count; r++) {
            const float *x = source_row(&from, team->shape, r, m->in_dim, room);
            rows.scale[r] = round_row(p, x, rows.codes + r * width);
        }
    } else {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < count; r++) {
            const float *x = source_row(&from, team->shape, r, m->in_dim, room);
            rows.scale[r] = round_row(p, x, rows.codes + r * width);
        }
    }
    multiply_rounded(p, rows, count, to, team->threads);
}

/* Queries, keys and values [rows][(heads + 2 kv_heads) * dim] of hidden states. */
static void begin_layer(
    const Team *team, const Layer *layer, const float *h, int64_t rows, float *fused,
    int64_t stride) {
    const Shape *s = team->shape;
    Source from = {NORMED, h, s->hidden, layer->input_norm};
    project(team, &layer->qkv, from, rows, (Target){fused, stride, 0});
    if (layer->q_norm == NULL) return;
    int64_t normed = s->heads + s->kv_heads;
#pragma omp for schedule(static)
    for (int64_t turn = 0; turn < rows * normed; turn++) {
        float *head = fused + turn / normed * stride + turn % normed * s->dim;
        const float *weight = turn % normed < s->heads ? layer->q_norm : layer->k_norm;
        norm_row(head, weight, s->eps, head, s->dim);
    }
}

/* h += what attention found, and then the MLP. `inner` [rows][2 inner]. */
static void end_layer(
    const Team *team, const Layer *layer, float *h, int64_t rows, const float *attended,
    int64_t stride, float *inner) {
    const Shape *s = team->shape;
    Target to = {h, s->hidden, 1};
    project(team, &layer->out, (Source){AS_THEY_ARE, attended, stride, NULL}, rows, to);
    Source normed = {NORMED, h, s->hidden, layer->mlp_norm};
    project(team, &layer->gate_up, normed, rows, (Target){inner, 2 * s->inner, 0});
    project(team, &layer->down, (Source){GATED, inner, 2 * s->inner, NULL}, rows, to);
}

/* What a team needs, behind `bytes` that the caller needs; 0 where there is no memory. */
static char *make_team(
    Team *team, const Shape *shape, const Layer *layers, int64_t num_layers, int64_t rows,
    int threads, int64_t bytes) {
    int64_t widest = 0, columns = 0, has_floats = 0;
    for (int64_t n = 0; n < num_layers; n++) {
        const Matrix *all[] = {
            &layers[n].qkv, &layers[n].out, &layers[n].gate_up, &layers[n].down};
        for (int i = 0; i < 4; i++) {
            widest = all[i]->in_dim > widest ? all[i]->in_dim : widest;
            has_floats |= all[i]->rounded == NULL;
            if (all[i]->rounded && all[i]->rounded->columns > columns)
                columns = all[i]->rounded->columns;
        }
    }
    int64_t few = MIN(rows, FEW_ROWS);
    int64_t held = has_floats && rows > FEW_ROWS ? FLOAT_ROWS : FEW_ROWS; /* rows as floats */
    int64_t own = ALIGNED((held * widest + LANES) * sizeof(float) + codes_bytes(few, columns));
    int64_t scales = ALIGNED(rows * sizeof(float)), codes = ALIGNED(codes_bytes(rows, columns));
    bytes = ALIGNED(bytes);
    char *memory = malloc(bytes + scales + codes + threads * own + 64);
    if (memory == NULL) return NULL;
    char *at = (char *)ALIGNED((int64_t)(intptr_t)memory) + bytes;
    *team = (Team){shape, threads, {(Code *)(at + scales), (float *)at}, at + scales + codes, own,
                   widest, columns};
    return memory;
}

/* Queries, keys and values of hidden states [rows][hidden]: fused, with a stride. Returns 0, or 1
 * where there was no memory. */
int kvw_begin_layer(
    const Shape *shape, const Layer *layer, const float *h, int64_t rows, float *fused,
    int64_t stride, int threads) {
    Team team;
    char *memory = make_team(&team, shape, layer, 1, rows, threads, 0);
    if (memory == NULL) return 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    begin_layer(&team, layer, h, rows, fused, stride);
    free(memory);
    return 0;
}

/* The rest of a layer: h [rows][hidden] is written over. Returns as the last. */
int kvw_end_layer(
    const Shape *shape, const Layer *layer, float *h, int64_t rows, const float *attended,
    int64_t stride, int threads) {
    Team team;
    int64_t bytes = rows * 2 * shape->inner * sizeof(float);
    char *memory = make_team(&team, shape, layer, 1, rows, threads, bytes);
    if (memory == NULL) return 1;
    float *inner = (float *)ALIGNED((int64_t)(intptr_t)memory);
#pragma omp parallel num_threads(threads) if (threads > 1)
    end_layer(&team, layer, h, rows, attended, stride, inner);
    free(memory);
    return 0;
}

/* Rows [first, first + count) of a pass: those of one sequence. */
typedef struct {
    int64_t first, count;
    float *keys, *values;  /* of slot 0 in layer 0: [slots][kv_heads][dim] */
    int64_t layer_stride;  /* floats from layer to layer */
    const int64_t *pieces; /* as in Held */
    int64_t num_pieces;
} SequenceRows;

typedef struct {
    const Shape *shape;
    const Layer *layers; /* of the model, from layer 0 on */
    float *h;            /* [rows][hidden] */
    int64_t rows;
    const float *cos, *sin;   /* [rows][half] */
    const int64_t *positions; /* [rows], ascending within a sequence */
    const int64_t *slots;     /* [rows]: where their keys and values go */
    const SequenceRows *sequences;
    int64_t num_sequences;
} Pass;

/* What one thread looks at in one go. */
typedef struct {
    int32_t sequence, head, nth; /* the nth part of a single row, or tile of many rows */
    int64_t part;                /* of a single row: where its parts go, in floats */
} Task;

static Held held_of(const Pass *pass, const SequenceRows *q, int64_t layer) {
    int64_t dim = pass->shape->dim, row = pass->shape->kv_heads * dim;
    int64_t at = layer * q->layer_stride;
    return (Held){q->keys + at, q->values + at, row, dim, row, dim, q->pieces, q->num_pieces};
}

static int64_t parts_of(const Pass *pass, const SequenceRows *q) {
    return whole(pass->positions[q->first] + 1, PART_KEYS) / PART_KEYS;
}

static int64_t tiles_of(const Pass *pass, const SequenceRows *q) {
    int64_t group = pass->shape->heads / pass->shape->kv_heads;
    return whole(q->count * group, QUERIES) / QUERIES;
}

/* The tasks of a layer, those of many rows first: they are the largest. `tasks` may be none. Counts
 * them, and the floats of parts. */
static int64_t list_tasks(const Pass *pass, Task *tasks, int64_t *part_floats) {
    const Shape *s = pass->shape;
    int64_t count = 0, part = 0;
    for (int single = 0; single < 2; single++)
        for (int64_t n = 0; n < pass->num_sequences; n++) {
            const SequenceRows *q = pass->sequences + n;
            if ((q->count == 1) != single || q->count == 0) continue;
            int64_t all = single ? parts_of(pass, q) : tiles_of(pass, q);
            for (int64_t turn = 0; turn < all * s->kv_heads; turn++, count++) {
                if (tasks)
                    tasks[count] = (Task){(int32_t)n, (int32_t)(turn % s->kv_heads),
                                          (int32_t)(all - 1 - turn / s->kv_heads), part};
            }
            if (single) part += all * s->heads * PART(s->dim);
        }
    *part_floats = part;
    return count;
}

static void do_task(
    const Pass *pass, int64_t layer, const Task *task, const float *q, float *parts, float *out) {
    const Shape *s = pass->shape;
    const SequenceRows *rows = pass->sequences + task->sequence;
    int64_t group = s->heads / s->kv_heads, wide = s->heads * s->dim, h = task->head;
    Held held = held_of(pass, rows, layer);
    if (rows->count == 1) {
        int64_t start = (int64_t)task->nth * PART_KEYS;
        int64_t count = MIN(PART_KEYS, pass->positions[rows->first] + 1 - start);
        float *part = parts + task->part + (task->nth * s->heads + h * group) * PART(s->dim);
        q += rows->first * wide + h * group * s->dim;
        attend_part(q, &held, h, start, count, group, s->dim, s->scale, part);
        return;
    }
    Attention all = {
        q + rows->first * wide, wide, s->dim, pass->positions + rows->first, held,
        out + rows->first * wide, rows->count, s->kv_heads, group, s->dim, s->scale};
    attend_lanes(&all, h, (int64_t)task->nth * QUERIES);
}

/* Keys and values where they belong, keys and queries turned. */
static void place_rows(const Pass *pass, int64_t layer, const float *fused, float *turned) {
    const Shape *s = pass->shape;
    int64_t heads = s->heads, kv_heads = s->kv_heads, dim = s->dim;
    int64_t all = heads + 2 * kv_heads;
    for (int64_t n = 0; n < pass->num_sequences; n++) {
        const SequenceRows *q = pass->sequences + n;
#pragma omp for schedule(static) nowait
        for (int64_t turn = q->first * all; turn < (q->first + q->count) * all; turn++) {
            int64_t r = turn / all, head = turn % all;
            const float *from = fused + turn * dim;
            const float *c = pass->cos + r * s->half, *sin = pass->sin + r * s->half;
            int64_t at = layer * q->layer_stride + pass->slots[r] * kv_heads * dim;
            if (head < heads)
                turn_head(from, c, sin, turned + (r * heads + head) * dim, dim, s->half);
            else if (head < heads + kv_heads)
                turn_head(from, c, sin, q->keys + at + (head - heads) * dim, dim, s->half);
            else
                memcpy(q->values + at + (head - heads - kv_heads) * dim, from, dim * sizeof(float));
        }
    }
#pragma omp barrier
}

static void attend_pass(
    const Pass *pass, int64_t layer, const Task *tasks, int64_t num_tasks, const float *q,
    float *parts, float *out) {
    const Shape *s = pass->shape;
#pragma omp for schedule(dynamic, 1)
    for (int64_t n = 0; n < num_tasks; n++) do_task(pass, layer, tasks + n, q, parts, out);
    int64_t part = 0, step = s->heads * PART(s->dim);
    for (int64_t n = 0; n < pass->num_sequences; n++) {
        const SequenceRows *rows = pass->sequences + n;
        if (rows->count != 1) continue;
        int64_t blocks = parts_of(pass, rows);
#pragma omp for schedule(static) nowait
        for (int64_t head = 0; head < s->heads; head++) {
            float *to = out + (rows->first * s->heads + head) * s->dim;
            join_parts(parts + part + head * PART(s->dim), step, blocks, s->dim, to);
        }
        part += blocks * step;
    }
#pragma omp barrier
}

/* Layers [from, to) for all rows of a pass. Returns 0, or 1 where there was no memory: nothing is
 * written then. */
int kvw_run_layers(const Pass *pass, int64_t from, int64_t to, int threads) {
    const Shape *s = pass->shape;
    int64_t rows = pass->rows, wide = s->heads * s->dim, fused_wide = wide + 2 * s->kv_heads * s->dim;
    int64_t part_floats, num_tasks = list_tasks(pass, NULL, &part_floats);
    int64_t fused_bytes = ALIGNED(rows * fused_wide * sizeof(float));
    int64_t wide_bytes = ALIGNED(rows * wide * sizeof(float));
    int64_t inner_bytes = ALIGNED(rows * 2 * s->inner * sizeof(float));
    int64_t part_bytes = ALIGNED(part_floats * sizeof(float));
    int64_t bytes = fused_bytes + 2 * wide_bytes + inner_bytes + part_bytes;
    bytes += num_tasks * sizeof(Task);
    Team team;
    char *memory = make_team(&team, s, pass->layers + from, to - from, rows, threads, bytes);
    if (memory == NULL) return 1;
    char *at = (char *)ALIGNED((int64_t)(intptr_t)memory);
    float *fused = (float *)at, *turned = (float *)(at += fused_bytes);
    float *attended = (float *)(at += wide_bytes), *inner = (float *)(at += wide_bytes);
    float *parts = (float *)(at += inner_bytes);
    Task *tasks = (Task *)(at + part_bytes);
    list_tasks(pass, tasks, &part_floats);
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (int64_t n = from; n < to; n++) {
        const Layer *layer = pass->layers + n;
        begin_layer(&team, layer, pass->h, rows, fused, fused_wide);
        place_rows(pass, n, fused, turned);
        attend_pass(pass, n, tasks, num_tasks, turned, parts, attended);
        end_layer(&team, layer, pass->h, rows, attended, wide, inner);
    }
    free(memory);
    return 0;
}
