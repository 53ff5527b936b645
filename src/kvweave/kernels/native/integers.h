/* ---- integers of this CPU: sums of 16 channels, four columns at a time ---- */

#define LANES 16 /* channels of one Sums */
#define GROUP 4  /* columns that are multiplied at a time */

#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && !defined(KVW_PLAIN)
/* unsigned times signed: codes of rows are moved up by SHIFT, and sums begin that much lower */
#define KIND "AVX-512 VNNI"
#define SHIFT 128
#define TILE_ROWS 12
#define TILE_VECS 2
typedef uint8_t Code;
typedef __m512i Sums;
typedef __m512i Weights;
typedef __m512i Four;
INLINE Sums begin(const int32_t *start) { return _mm512_loadu_si512(start); }
INLINE Weights weights_at(const int8_t *w) { return _mm512_loadu_si512(w); }
INLINE Four four_at(const Code *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm512_set1_epi32(four);
}
INLINE Sums dot(Sums s, Four x, Weights w) { return _mm512_dpbusd_epi32(s, x, w); }
INLINE void end(Sums s, int32_t *sums) { _mm512_storeu_si512(sums, s); }

#elif defined(__AVXVNNI__) && defined(__AVX2__) && !defined(KVW_PLAIN)
#define KIND "AVX VNNI"
#define SHIFT 128
#define TILE_ROWS 6
#define TILE_VECS 1
typedef uint8_t Code;
typedef struct { __m256i half[2]; } Sums;
typedef struct { __m256i half[2]; } Weights;
typedef __m256i Four;
INLINE __m256i load8(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE Sums begin(const int32_t *start) {
    return (Sums){{load8(start), load8(start + 8)}};
}
INLINE Weights weights_at(const int8_t *w) { return (Weights){{load8(w), load8(w + 32)}}; }
INLINE Four four_at(const Code *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm256_set1_epi32(four);
}
INLINE Sums dot(Sums s, Four x, Weights w) {
    s.half[0] = _mm256_dpbusd_avx_epi32(s.half[0], x, w.half[0]);
    s.half[1] = _mm256_dpbusd_avx_epi32(s.half[1], x, w.half[1]);
    return s;
}
INLINE void end(Sums s, int32_t *sums) {
    _mm256_storeu_si256((__m256i *)sums, s.half[0]);
    _mm256_storeu_si256((__m256i *)(sums + 8), s.half[1]);
}

#elif defined(__AVX2__) && !defined(KVW_PLAIN)
/* 16 bits wide: what multiplies 8 bits here adds pairs in 16, which overflow. A channel has two
 * sums, of columns 0, 1 and of columns 2, 3, until the end. */
#define KIND "AVX2"
#define SHIFT 0
#define TILE_ROWS 2
#define TILE_VECS 1
typedef int16_t Code;
typedef struct { __m256i of4[4]; } Sums;
typedef struct { __m256i of4[4]; } Weights;
typedef __m256i Four;
INLINE Sums begin(const int32_t *start) {
    (void)start; /* SHIFT is 0: all zeros */
    __m256i zero = _mm256_setzero_si256();
    return (Sums){{zero, zero, zero, zero}};
}
INLINE Weights weights_at(const int8_t *w) {
    Weights wide;
    for (int i = 0; i < 4; i++)
        wide.of4[i] = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + 16 * i)));
    return wide;
}
INLINE Four four_at(const Code *x) {
    int64_t four;
    memcpy(&four, x, sizeof four);
    return _mm256_set1_epi64x(four);
}
INLINE Sums dot(Sums s, Four x, Weights w) {
    for (int i = 0; i < 4; i++)
        s.of4[i] = _mm256_add_epi32(s.of4[i], _mm256_madd_epi16(x, w.of4[i]));
    return s;
}
INLINE void end(Sums s, int32_t *sums) {
    for (int i = 0; i < 2; i++) {
        __m256i pairs = _mm256_hadd_epi32(s.of4[2 * i], s.of4[2 * i + 1]);
        __m256i inOrder = _mm256_permute4x64_epi64(pairs, 0xD8);
        _mm256_storeu_si256((__m256i *)(sums + 8 * i), inOrder);
    }
}

#elif defined(__ARM_FEATURE_DOTPROD) && !defined(KVW_PLAIN)
/* Sixteen columns of a row come with one load, and a lane of them is multiplied: to fill a register
 * with four columns would take a place among the products. */
#define KIND "NEON dot product"
#define SHIFT 0
#define TILE_ROWS 4 /* more of them, and the compiler runs out of registers */
#define TILE_VECS 1
#define LANE_GROUPS 4 /* of one load */
typedef int8_t Code;
typedef struct { int32x4_t of4[4]; } Sums;
typedef struct { int8x16_t of4[4]; } Weights;
typedef int8x16_t Four;
INLINE Sums begin(const int32_t *start) {
    (void)start; /* SHIFT is 0: all zeros */
    int32x4_t zero = vdupq_n_s32(0);
    return (Sums){{zero, zero, zero, zero}};
}
INLINE Weights weights_at(const int8_t *w) {
    return (Weights){{vld1q_s8(w), vld1q_s8(w + 16), vld1q_s8(w + 32), vld1q_s8(w + 48)}};
}
INLINE Four four_at(const Code *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return vreinterpretq_s8_s32(vdupq_n_s32(four));
}
INLINE Sums dot(Sums s, Four x, Weights w) {
    for (int i = 0; i < 4; i++) s.of4[i] = vdotq_s32(s.of4[i], w.of4[i], x);
    return s;
}
INLINE Four lanes_at(const Code *x) { return vld1q_s8(x); }
/* not a function: the lane must be a constant before anything is inlined */
#define ADD_LANE(s, x, lane, w)                                                                    \
    for (int i = 0; i < 4; i++) (s).of4[i] = vdotq_laneq_s32((s).of4[i], (w).of4[i], x, lane);
INLINE void end(Sums s, int32_t *sums) {
    for (int i = 0; i < 4; i++) vst1q_s32(sums + 4 * i, s.of4[i]);
}

#else
#define KIND "plain C"
#define SHIFT 0
#define TILE_ROWS 4
#define TILE_VECS 1
typedef int8_t Code;
typedef struct { int32_t of[LANES]; } Sums;
typedef const int8_t *Weights;
typedef const Code *Four;
INLINE Sums begin(const int32_t *start) {
    Sums s;
    memcpy(s.of, start, sizeof s.of);
    return s;
}
INLINE Weights weights_at(const int8_t *w) { return w; }
INLINE Four four_at(const Code *x) { return x; }
INLINE Sums dot(Sums s, Four x, Weights w) {
    for (int o = 0; o < LANES; o++)
        for (int c = 0; c < GROUP; c++) s.of[o] += (int32_t)x[c] * w[GROUP * o + c];
    return s;
}
INLINE void end(Sums s, int32_t *sums) { memcpy(sums, s.of, sizeof s.of); }
#endif
