/* ---- whole layers ----
 *
 * A team of threads goes through the steps of a layer together, without being sent for anew at each
 * of them: few rows have little to do per step. Functions with a Team are called by all its threads.
 */

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
    float *rows;        /* all rows as floats [rows][widest], for float32 weights */
    char *own;          /* of each thread: few rows as floats, their scales, their codes; or weights */
    int64_t own_bytes, widest;
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

/* Rows times float32 weights, by a team. Few rows are made by every thread, which takes some
 * channels: waiting would cost more. */
static void project_floats(
    const Team *team, const Matrix *m, Source from, int64_t count, Target to, float *room) {
    float *rows = count <= FEW_ROWS ? room : team->rows;
    if (from.step != AS_THEY_ARE) {
        if (count <= FEW_ROWS) {
            for (int64_t r = 0; r < count; r++)
                source_row(&from, team->shape, r, m->in_dim, rows + r * team->widest);
        } else {
#pragma omp for schedule(static)
            for (int64_t r = 0; r < count; r++)
                source_row(&from, team->shape, r, m->in_dim, rows + r * team->widest);
        }
        from.x = rows;
        from.stride = team->widest;
    }
    multiply_floats(m, from.x, from.stride, count, to, team->threads, room);
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
    int64_t widest = 0, columns = 0, strip = 0;
    for (int64_t n = 0; n < num_layers; n++) {
        const Matrix *all[] = {
            &layers[n].qkv, &layers[n].out, &layers[n].gate_up, &layers[n].down};
        for (int i = 0; i < 4; i++) {
            int64_t dims = all[i]->in_dim;
            widest = dims > widest ? dims : widest;
            if (all[i]->rounded == NULL)
                strip = strip_bytes(dims) > strip ? strip_bytes(dims) : strip;
            else if (all[i]->rounded->columns > columns)
                columns = all[i]->rounded->columns;
        }
    }
    widest = whole(widest, LINE) + LINE; /* rows that lie 4096 bytes apart would share a place */
    int64_t few = MIN(rows, FEW_ROWS), many = rows > FEW_ROWS && strip > 0 ? rows : 0;
    int64_t own = (FEW_ROWS * widest + LANES) * sizeof(float) + codes_bytes(few, columns);
    own = ALIGNED(many && strip > own ? strip : own);
    int64_t scales = ALIGNED(rows * sizeof(float)), codes = ALIGNED(codes_bytes(rows, columns));
    int64_t floats = ALIGNED(many * widest * sizeof(float));
    bytes = ALIGNED(bytes);
    char *memory = malloc(bytes + scales + codes + floats + threads * own + 64);
    if (memory == NULL) return NULL;
    char *at = (char *)ALIGNED((int64_t)(intptr_t)memory) + bytes;
    RoundedRows shared = {(Code *)(at + scales), (float *)at};
    at += scales + codes;
    *team = (Team){shape, threads, shared, (float *)at, at + floats, own, widest};
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
