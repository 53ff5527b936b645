/* ---- stored chunks: laid where they belong, and moved ---- */

#define LAID_TOKENS 32 /* of a chunk that a thread takes at a time */

/* An fp16 number; none of those stored is infinite or nan. */
INLINE float half_at(const uint8_t *from, int64_t nth) {
    uint16_t bits;
    memcpy(&bits, from + 2 * nth, sizeof bits);
    uint32_t wide = (uint32_t)(bits & 0x7fff) << 13, sign = (uint32_t)(bits & 0x8000) << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    value *= 5.192296858534828e33f; /* 2^112: the exponents begin elsewhere */
    memcpy(&wide, &value, sizeof wide);
    wide |= sign;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* One layer of one chunk in 8-bit codes, and where it goes. */
typedef struct {
    const uint8_t *data; /* keys: codes [tokens][heads][dim], scales, lows; values likewise */
    int64_t tokens;
    int64_t row; /* of the request's KV, for its first token */
    int64_t nth; /* its first token among those of all chunks: whose angle is the first */
} StoredChunk;

typedef struct {
    const StoredChunk *chunks;
    int64_t num_chunks;
    int64_t group; /* values that share parameters: keys along tokens, values along dims */
    int64_t heads, dim, half;
    const float *cos, *sin; /* [tokens of all chunks][half] */
    float *keys, *values;   /* [rows][heads][dim] */
    int64_t key_row, value_row;
} Laying;

/* Tokens [start, end) of a chunk; all of one group of keys. */
static void lay_tokens(const Laying *t, const StoredChunk *chunk, int64_t start, int64_t end) {
    int64_t dim = t->dim, width = t->heads * dim, half = t->half;
    int64_t key_groups = whole(chunk->tokens, t->group) / t->group;
    int64_t value_groups = whole(dim, t->group) / t->group;
    const uint8_t *k_codes = chunk->data, *k_scale = k_codes + chunk->tokens * width;
    const uint8_t *k_low = k_scale + 2 * key_groups * width;
    const uint8_t *v_codes = k_low + 2 * key_groups * width;
    const uint8_t *v_scale = v_codes + chunk->tokens * width;
    const uint8_t *v_low = v_scale + 2 * chunk->tokens * t->heads * value_groups;
    int64_t group = start / t->group * width;
    for (int64_t h = 0; h < t->heads; h++) {
        float scale[MOST_DIM], low[MOST_DIM], key[MOST_DIM];
        for (int64_t d = 0; d < dim; d++) {
            scale[d] = half_at(k_scale, group + h * dim + d);
            low[d] = half_at(k_low, group + h * dim + d);
        }
        for (int64_t n = start; n < end; n++) {
            const uint8_t *codes = k_codes + n * width + h * dim;
            for (int64_t d = 0; d < dim; d++) key[d] = low[d] + (float)codes[d] * scale[d];
            int64_t angle = (chunk->nth + n) * half;
            float *to = t->keys + (chunk->row + n) * t->key_row + h * dim;
            turn_head(key, t->cos + angle, t->sin + angle, to, dim, half);
        }
    }
    for (int64_t n = start; n < end; n++) {
        float *to = t->values + (chunk->row + n) * t->value_row;
        for (int64_t h = 0; h < t->heads; h++)
            for (int64_t g = 0; g < value_groups; g++) {
                int64_t param = (n * t->heads + h) * value_groups + g;
                float scale = half_at(v_scale, param), low = half_at(v_low, param);
                const uint8_t *codes = v_codes + n * width + h * dim;
                for (int64_t d = g * t->group; d < MIN(dim, (g + 1) * t->group); d++)
                    to[h * dim + d] = (float)codes[d] * scale + low;
            }
    }
}

/* Decode chunks of one layer, turn their keys and lay both in place. dim is at most MOST_DIM. */
void kvw_lay_chunks(const Laying *t, int threads) {
    int64_t most = 0;
    for (int64_t c = 0; c < t->num_chunks; c++)
        most = t->chunks[c].tokens > most ? t->chunks[c].tokens : most;
    int64_t step = MIN(LAID_TOKENS, t->group), per_group = whole(t->group, step) / step;
    int64_t turns = whole(most, t->group) / t->group * per_group;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (threads > 1)
    for (int64_t turn = 0; turn < turns * t->num_chunks; turn++) {
        const StoredChunk *chunk = t->chunks + turn / turns;
        int64_t nth = turn % turns, first = nth / per_group * t->group;
        int64_t start = first + nth % per_group * step;
        int64_t end = MIN(MIN(start + step, first + t->group), chunk->tokens);
        if (start < end) lay_tokens(t, chunk, start, end);
    }
}

/* What fresh rows change, summed by chunk. Strides are in floats. */
typedef struct {
    const float *fresh_k, *fresh_v; /* [rows][heads][dim], keys not turned */
    int64_t fresh_k_row, fresh_k_head, fresh_v_row, fresh_v_head;
    const int64_t *rows;    /* [chosen]: of the fresh ones */
    const int64_t *at;      /* [chosen]: where they go */
    const float *cos, *sin; /* [chosen][half]: of that place */
    const float *keys, *values; /* [..][heads][dim], keys turned */
    int64_t key_row, value_row;
    const int32_t *bounds; /* [chunks + 1]: of each chunk among the chosen */
    const float *weights;  /* [chunks] */
    float *by;             /* [2][chunks][heads][dim] */
    int64_t chunks, heads, dim, half;
} Changes;

static void sum_changes(const Changes *t, int64_t chunk, int64_t h) {
    int64_t dim = t->dim, half = t->half, size = t->heads * dim;
    float *by_k = t->by + chunk * size + h * dim, *by_v = by_k + t->chunks * size;
    for (int64_t d = 0; d < dim; d++) by_k[d] = by_v[d] = 0.0f;
    for (int64_t c = t->bounds[chunk]; c < t->bounds[chunk + 1]; c++) {
        const float *k = t->fresh_k + t->rows[c] * t->fresh_k_row + h * t->fresh_k_head;
        const float *v = t->fresh_v + t->rows[c] * t->fresh_v_row + h * t->fresh_v_head;
        const float *key = t->keys + t->at[c] * t->key_row + h * dim;
        const float *value = t->values + t->at[c] * t->value_row + h * dim;
        const float *cos = t->cos + c * half, *sin = t->sin + c * half;
        for (int64_t j = 0; j < half; j++) { /* the stored key is turned back */
            float length = cos[j] * cos[j] + sin[j] * sin[j]; /* YaRN's factor, and rounding */
            by_k[j] += k[j] - (key[j] * cos[j] + key[j + half] * sin[j]) / length;
            by_k[j + half] += k[j + half] - (key[j + half] * cos[j] - key[j] * sin[j]) / length;
        }
        for (int64_t d = 2 * half; d < dim; d++) by_k[d] += k[d] - key[d];
        for (int64_t d = 0; d < dim; d++) by_v[d] += v[d] - value[d];
    }
    for (int64_t d = 0; d < dim; d++) {
        by_k[d] *= t->weights[chunk];
        by_v[d] *= t->weights[chunk];
    }
}

void kvw_sum_changes(const Changes *t, int threads) {
    int64_t turns = t->chunks * t->heads;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (threads > 1)
    for (int64_t turn = 0; turn < turns; turn++)
        sum_changes(t, turn / t->heads, turn % t->heads);
}

/* Rows of chunks that move by one vector each. */
typedef struct {
    const int64_t *runs;    /* (first row, rows) of each chunk */
    const float *cos, *sin; /* [rows of all chunks][half] */
    float *keys, *values;   /* [..][heads][dim], keys turned */
    int64_t key_row, value_row;
    const float *by_k, *by_v; /* [chunks][heads][dim], keys not turned */
    int64_t chunks, heads, dim, half;
} Shifting;

static void shift_row(
    const Shifting *t, int64_t row, const float *cos, const float *sin, const float *by_k,
    const float *by_v) {
    int64_t half = t->half;
    float *value = t->values + row * t->value_row;
    for (int64_t h = 0; h < t->heads; h++) {
        float *key = t->keys + row * t->key_row + h * t->dim;
        const float *by = by_k + h * t->dim;
        for (int64_t j = 0; j < half; j++) {
            key[j] += by[j] * cos[j] - by[j + half] * sin[j];
            key[j + half] += by[j + half] * cos[j] + by[j] * sin[j];
        }
        for (int64_t d = 2 * half; d < t->dim; d++) key[d] += by[d];
    }
    for (int64_t d = 0; d < t->heads * t->dim; d++) value[d] += by_v[d];
}

void kvw_shift_runs(const Shifting *t, int threads) {
    int64_t size = t->heads * t->dim;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int64_t before = 0; /* rows of the chunks so far */
        for (int64_t c = 0; c < t->chunks; c++) {
            int64_t first = t->runs[2 * c], rows = t->runs[2 * c + 1];
#pragma omp for schedule(static) nowait
            for (int64_t n = 0; n < rows; n++) {
                int64_t angle = (before + n) * t->half;
                shift_row(t, first + n, t->cos + angle, t->sin + angle, t->by_k + c * size,
                          t->by_v + c * size);
            }
            before += rows;
        }
    }
}

/* Fresh rows between projection and attention. Strides are in floats. */
typedef struct {
    const float *q, *k, *v; /* [rows][heads][dim], keys and queries not turned */
    int64_t q_row, q_head, k_row, k_head, v_row, v_head;
    const float *cos, *sin; /* [rows][half] */
    const int64_t *at;      /* [rows]: where keys and values go */
    float *turned;          /* [rows][q_heads][dim] */
    float *keys, *values;   /* [..][kv_heads][dim] */
    int64_t key_row, value_row;
    int64_t rows, q_heads, kv_heads, dim, half;
} Placing;

/* Turn queries, and keys on their way to their places; values go there as they are. */
void kvw_place_rows(const Placing *t, int threads) {
    int64_t all = t->q_heads + 2 * t->kv_heads, dim = t->dim;
    int is_large = threads > 1 && t->rows * all * dim > PARALLEL_VALUES;
#pragma omp parallel for num_threads(threads) if (is_large)
    for (int64_t r = 0; r < t->rows; r++) {
        const float *cos = t->cos + r * t->half, *sin = t->sin + r * t->half;
        const float *q = t->q + r * t->q_row, *k = t->k + r * t->k_row, *v = t->v + r * t->v_row;
        float *turned = t->turned + r * t->q_heads * dim;
        float *key = t->keys + t->at[r] * t->key_row, *value = t->values + t->at[r] * t->value_row;
        for (int64_t h = 0; h < t->q_heads; h++)
            turn_head(q + h * t->q_head, cos, sin, turned + h * dim, dim, t->half);
        for (int64_t h = 0; h < t->kv_heads; h++) {
            turn_head(k + h * t->k_head, cos, sin, key + h * dim, dim, t->half);
            memcpy(value + h * dim, v + h * t->v_head, dim * sizeof(float));
        }
    }
}
