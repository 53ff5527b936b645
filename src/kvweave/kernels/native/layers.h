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

#define NEAR_BYTES (8 << 20) /* of what the MLP makes of some rows: more would not stay near */
#define LEAST_STRETCH 192    /* rows: fewer would bring weights too often */

/* Memory of a team. */
typedef struct {
    const Shape *shape;
    int threads;
    int64_t stretch;    /* rows that go through products together */
    RoundedRows shared; /* of a stretch */
    float *rows;        /* a stretch as floats [rows][widest], for float32 weights */
    float *inner;       /* what the MLP makes of it [rows][2 inner] */
    char *own;          /* of each thread: few rows as floats, their scales, their codes; or weights */
    int64_t own_bytes, widest;
} Team;

#define ALIGNED(bytes) whole(bytes, 64)

/* Rows that go through products together: memory for all rows of a long prompt would come from the
 * system for every layer anew, page by page. */
static int64_t stretch_of(const Shape *s, int64_t rows) {
    int64_t most = NEAR_BYTES / (2 * s->inner * (int64_t)sizeof(float));
    most = most < LEAST_STRETCH ? LEAST_STRETCH : most;
    if (rows <= most) return rows;
    int64_t stretches = whole(rows, most) / most;
    return whole(whole(rows, stretches) / stretches, BLOCK_ROWS);
}

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
    for (int64_t r = 0; r < rows; r += team->stretch) {
        Source from = {NORMED, h + r * s->hidden, s->hidden, layer->input_norm};
        int64_t count = MIN(team->stretch, rows - r);
        project(team, &layer->qkv, from, count, (Target){fused + r * stride, stride, 0});
    }
    if (layer->q_norm == NULL) return;
    int64_t normed = s->heads + s->kv_heads;
#pragma omp for schedule(static)
    for (int64_t turn = 0; turn < rows * normed; turn++) {
        float *head = fused + turn / normed * stride + turn % normed * s->dim;
        const float *weight = turn % normed < s->heads ? layer->q_norm : layer->k_norm;
        norm_row(head, weight, s->eps, head, s->dim);
    }
}

/* h += what attention found, and then the MLP. */
static void end_layer(
    const Team *team, const Layer *layer, float *h, int64_t rows, const float *attended,
    int64_t stride) {
    const Shape *s = team->shape;
    float *inner = team->inner;
    int64_t wide = 2 * s->inner;
    for (int64_t r = 0; r < rows; r += team->stretch) {
        int64_t count = MIN(team->stretch, rows - r);
        Target to = {h + r * s->hidden, s->hidden, 1};
        Source found = {AS_THEY_ARE, attended + r * stride, stride, NULL};
        project(team, &layer->out, found, count, to);
        Source normed = {NORMED, to.y, s->hidden, layer->mlp_norm};
        project(team, &layer->gate_up, normed, count, (Target){inner, wide, 0});
        project(team, &layer->down, (Source){GATED, inner, wide, NULL}, count, to);
    }
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
    rows = stretch_of(shape, rows);
    widest = whole(widest, LINE) + LINE; /* rows that lie 4096 bytes apart would share a place */
    int64_t few = MIN(rows, FEW_ROWS), many = rows > FEW_ROWS && strip > 0 ? rows : 0;
    int64_t own = (FEW_ROWS * widest + LANES) * sizeof(float) + codes_bytes(few, columns);
    own = ALIGNED(many && strip > own ? strip : own);
    int64_t scales = ALIGNED(rows * sizeof(float)), codes = ALIGNED(codes_bytes(rows, columns));
    int64_t floats = ALIGNED(many * widest * sizeof(float));
    int64_t inner = ALIGNED(rows * 2 * shape->inner * sizeof(float));
    bytes = ALIGNED(bytes);
    char *memory = malloc(bytes + scales + codes + floats + inner + threads * own + 64);
    if (memory == NULL) return NULL;
    char *at = (char *)ALIGNED((int64_t)(intptr_t)memory) + bytes;
    RoundedRows shared = {(Code *)(at + scales), (float *)at};
    at += scales + codes;
    *team = (Team){shape, threads, rows, shared, (float *)at, (float *)(at + floats),
                   at + floats + inner, own, widest};
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
    char *memory = make_team(&team, shape, layer, 1, rows, threads, 0);
    if (memory == NULL) return 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
    end_layer(&team, layer, h, rows, attended, stride);
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
    int32_t tiles;               /* of many rows: how many from there on */
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

/* Tiles of many rows, of all sequences and heads. */
static int64_t count_tiles(const Pass *pass) {
    const Shape *s = pass->shape;
    int64_t count = 0;
    for (int64_t n = 0; n < pass->num_sequences; n++)
        if (pass->sequences[n].count > 1)
            count += tiles_of(pass->sequences[n].count, s->heads / s->kv_heads) * s->kv_heads;
    return count;
}

/* The tasks of a layer, those of many rows first: they are the largest. `tasks` may be none. Counts
 * them, and the floats of parts. */
static int64_t list_tasks(const Pass *pass, int threads, Task *tasks, int64_t *part_floats) {
    const Shape *s = pass->shape;
    int64_t count = 0, part = 0, together = tiles_together(count_tiles(pass), threads);
    for (int single = 0; single < 2; single++)
        for (int64_t n = 0; n < pass->num_sequences; n++) {
            const SequenceRows *q = pass->sequences + n;
            if ((q->count == 1) != single || q->count == 0) continue;
            int64_t all = single ? parts_of(pass, q) : tiles_of(q->count, s->heads / s->kv_heads);
            int64_t step = single ? 1 : together, turns = whole(all, step) / step;
            for (int64_t turn = 0; turn < turns * s->kv_heads; turn++, count++) {
                int64_t nth = (turns - 1 - turn / s->kv_heads) * step;
                if (tasks)
                    tasks[count] = (Task){(int32_t)n, (int32_t)(turn % s->kv_heads), (int32_t)nth,
                                          (int32_t)MIN(step, all - nth), part};
            }
            if (single) part += all * s->heads * PART(s->dim);
        }
    *part_floats = part;
    return count;
}

/* What rows make of hidden states: queries, keys and values. What queries find takes their place. */
static int64_t fused_wide(const Shape *s) { return (s->heads + 2 * s->kv_heads) * s->dim; }

static void do_task(
    const Pass *pass, int64_t layer, const Task *task, float *fused, float *parts,
    TilesRoom *rooms) {
    const Shape *s = pass->shape;
    const SequenceRows *rows = pass->sequences + task->sequence;
    int64_t group = s->heads / s->kv_heads, wide = fused_wide(s), h = task->head;
    float *q = fused + rows->first * wide;
    Held held = held_of(pass, rows, layer);
    if (rows->count == 1) {
        int64_t start = (int64_t)task->nth * PART_KEYS;
        int64_t count = MIN(PART_KEYS, pass->positions[rows->first] + 1 - start);
        float *part = parts + task->part + (task->nth * s->heads + h * group) * PART(s->dim);
        q += h * group * s->dim;
        attend_part(q, &held, h, start, count, group, s->dim, s->scale, part);
        return;
    }
    Attention all = {
        q, wide, s->dim, pass->positions + rows->first, held, q, wide, rows->count, s->kv_heads,
        group, s->dim, s->scale};
    attend_tiles(&all, h, task->nth, task->tiles, rooms + omp_get_thread_num());
}

/* Keys and values where they belong, keys and queries turned. */
static void place_rows(const Pass *pass, int64_t layer, float *fused) {
    const Shape *s = pass->shape;
    int64_t heads = s->heads, kv_heads = s->kv_heads, dim = s->dim;
    int64_t all = heads + 2 * kv_heads;
    for (int64_t n = 0; n < pass->num_sequences; n++) {
        const SequenceRows *q = pass->sequences + n;
#pragma omp for schedule(static) nowait
        for (int64_t turn = q->first * all; turn < (q->first + q->count) * all; turn++) {
            int64_t r = turn / all, head = turn % all;
            float turned[MOST_DIM], *from = fused + turn * dim;
            const float *c = pass->cos + r * s->half, *sin = pass->sin + r * s->half;
            int64_t at = layer * q->layer_stride + pass->slots[r] * kv_heads * dim;
            if (head < heads) {
                turn_head(from, c, sin, turned, dim, s->half);
                memcpy(from, turned, dim * sizeof(float));
            } else if (head < heads + kv_heads)
                turn_head(from, c, sin, q->keys + at + (head - heads) * dim, dim, s->half);
            else
                memcpy(q->values + at + (head - heads - kv_heads) * dim, from, dim * sizeof(float));
        }
    }
#pragma omp barrier
}

static void attend_pass(
    const Pass *pass, int64_t layer, const Task *tasks, int64_t num_tasks, float *fused,
    float *parts, TilesRoom *rooms) {
    const Shape *s = pass->shape;
#pragma omp for schedule(dynamic, 1)
    for (int64_t n = 0; n < num_tasks; n++)
        do_task(pass, layer, tasks + n, fused, parts, rooms);
    int64_t part = 0, step = s->heads * PART(s->dim);
    for (int64_t n = 0; n < pass->num_sequences; n++) {
        const SequenceRows *rows = pass->sequences + n;
        if (rows->count != 1) continue;
        int64_t blocks = parts_of(pass, rows);
#pragma omp for schedule(static) nowait
        for (int64_t head = 0; head < s->heads; head++) {
            float *to = fused + rows->first * fused_wide(s) + head * s->dim;
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
    int64_t rows = pass->rows, wide = fused_wide(s);
    int64_t part_floats, num_tasks = list_tasks(pass, threads, NULL, &part_floats);
    int64_t fused_bytes = ALIGNED(rows * wide * sizeof(float));
    int64_t part_bytes = ALIGNED(part_floats * sizeof(float));
    int64_t room_bytes = count_tiles(pass) ? threads * (int64_t)sizeof(TilesRoom) : 0;
    int64_t bytes = fused_bytes + part_bytes + room_bytes + num_tasks * sizeof(Task);
    Team team;
    char *memory = make_team(&team, s, pass->layers + from, to - from, rows, threads, bytes);
    if (memory == NULL) return 1;
    char *at = (char *)ALIGNED((int64_t)(intptr_t)memory);
    float *fused = (float *)at, *parts = (float *)(at += fused_bytes);
    TilesRoom *rooms = (TilesRoom *)(at += part_bytes);
    Task *tasks = (Task *)(at + room_bytes);
    list_tasks(pass, threads, tasks, &part_floats);
#pragma omp parallel num_threads(threads) if (threads > 1)
    for (int64_t n = from; n < to; n++) {
        const Layer *layer = pass->layers + n;
        begin_layer(&team, layer, pass->h, rows, fused, wide);
        place_rows(pass, n, fused);
        attend_pass(pass, n, tasks, num_tasks, fused, parts, rooms);
        end_layer(&team, layer, pass->h, rows, fused, wide);
    }
    free(memory);
    return 0;
}
