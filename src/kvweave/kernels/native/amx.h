/* ---- products of many rows with AMX, where the CPU has it and the system lends it ----
 *
 * Sixteen rows by sixteen channels are one register of sums, 64 columns one instruction. Sums of
 * integers have no order: they are those of integers.h.
 */

#if defined(__AMX_INT8__) && defined(__linux__) && SHIFT == 128 && TILE_VECS == 2
#include <sys/syscall.h>
#include <unistd.h>

#define SQUARE 16                    /* rows, and channels, of a register of sums */
#define SQUARE_COLUMNS 64            /* of one instruction */
#define SQUARE_ROWS (2 * SQUARE)     /* whose sums are in registers */
#define LEAST_SQUARE_ROWS (TILE_ROWS + 1) /* fewer are one tile: done as soon without */
#define GROUP_BYTES (PANEL * GROUP)  /* from four columns of a panel to the next four */
#define SQUARE_BYTES (SQUARE_COLUMNS / GROUP * GROUP_BYTES)

static int has_squares; /* the system lends the registers, to all threads of the process */

__attribute__((constructor)) static void ask_for_squares(void) {
    const long request_permission = 0x1023, tile_data = 18; /* of asm/prctl.h */
    has_squares = syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}

/* All registers of this thread have SQUARE rows of 64 bytes, until `leave_squares`. */
static void enter_squares(void) {
    struct {
        uint8_t palette, start_row, unused[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shape.row_bytes[i] = SQUARE_COLUMNS;
        shape.rows[i] = SQUARE;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(shape));
}

static void leave_squares(void) { _tile_release(); }

/* Columns of SQUARE_COLUMNS join the sums: registers 0 and 1 those of the first rows, 2 and 3 those
 * of the rows behind them, if `two`. */
#define ADD_SQUARES(x, w)                                                                          \
    {                                                                                              \
        _tile_loadd(4, x, width);                                                                  \
        _tile_loadd(6, w, GROUP_BYTES);                                                            \
        _tile_dpbusd(0, 4, 6);                                                                     \
        _tile_loadd(7, (w) + SQUARE * GROUP, GROUP_BYTES);                                         \
        _tile_dpbusd(1, 4, 7);                                                                     \
        if (two) {                                                                                 \
            _tile_loadd(5, (x) + SQUARE * width, width);                                           \
            _tile_dpbusd(2, 5, 6);                                                                 \
            _tile_dpbusd(3, 5, 7);                                                                 \
        }                                                                                          \
    }

/* Sums of SQUARE rows and one panel, or of twice as many. `rest` [SQUARE_BYTES] are the weights of
 * the last columns, with zeros behind: codes that are read beyond a row's end count nothing. */
static __attribute__((noinline)) void multiply_square(
    const Product *p, int64_t first, const Code *codes, int two, const int8_t *rest, int32_t *out) {
    int64_t width = whole(p->columns, GROUP), c = 0;
    const int8_t *w = p->packed + first * width;
    const int32_t *start = p->start + first;
    __asm__ volatile("" ::: "memory"); /* the compiler does not know that registers are filled */
    _tile_loadd(0, start, 0);
    _tile_loadd(1, start + SQUARE, 0);
    if (two) {
        _tile_loadd(2, start, 0);
        _tile_loadd(3, start + SQUARE, 0);
    }
    for (; c + SQUARE_COLUMNS <= width; c += SQUARE_COLUMNS, w += SQUARE_BYTES)
        ADD_SQUARES(codes + c, w)
    if (c < width) ADD_SQUARES(codes + c, rest)
    _tile_stored(0, out, PANEL * sizeof *out);
    _tile_stored(1, out + SQUARE, PANEL * sizeof *out);
    if (!two) return;
    _tile_stored(2, out + SQUARE * PANEL, PANEL * sizeof *out);
    _tile_stored(3, out + SQUARE * PANEL + SQUARE, PANEL * sizeof *out);
}
#undef ADD_SQUARES

/* multiply_panel, between enter_squares and leave_squares. */
static void multiply_panel_squares(
    const Product *p, int64_t panel, const Code *codes, const float *row_scale, int64_t row,
    int64_t end, Target to) {
    int64_t width = whole(p->columns, GROUP), first = panel * PANEL;
    int64_t done = width / SQUARE_COLUMNS * SQUARE_COLUMNS;
    int8_t rest[SQUARE_BYTES] __attribute__((aligned(64))) = {0};
    int32_t sums[2][SQUARE_ROWS * PANEL] __attribute__((aligned(64)));
    memcpy(rest, p->packed + first * width + done * PANEL, (width - done) * PANEL);
    int64_t ready = row; /* rows before it are written: one step behind, for sums to arrive */
    for (int turn = 0; ready < end; row += SQUARE_ROWS, turn ^= 1) {
        for (int64_t r = row; r < MIN(row + SQUARE_ROWS, end); r++) /* nothing of it is near yet */
            for (int v = 0; v < TILE_VECS; v++)
                __builtin_prefetch(to.y + r * to.stride + first + v * LANES, 1);
        if (row < end)
            multiply_square(p, first, codes + row * width, end - row > SQUARE, rest, sums[turn]);
        for (int64_t r = 0; ready < MIN(row, end); r++, ready++) {
            float *y = to.y + ready * to.stride;
            write_row(p, first, sums[!turn] + r * PANEL, row_scale[ready], y, to.add);
        }
    }
}

#else
#define SQUARE_ROWS TILE_ROWS
#define SQUARE_COLUMNS 1
#define LEAST_SQUARE_ROWS 1
static const int has_squares = 0;
static void enter_squares(void) {}
static void leave_squares(void) {}
#define multiply_panel_squares multiply_panel
#endif
