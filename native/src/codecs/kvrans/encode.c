/* SPDX-License-Identifier: Apache-2.0 */
/*
 * encode.c - kvrans: writing streams
 *
 * The source is cut into blocks of up to 256 rows. Each is transposed, so that columns lie in one piece, counted,
 * planned (plan.c), coded from its last byte to its first, and written; or stored as it is where that is no
 * larger. The buffers for it are kept by the thread and grow to the largest block that it has seen.
 */
#include <stdlib.h>
#include <string.h>

#include "codecs/codec.h"
#include "codecs/kvrans/plan.h"

enum {
    ROW_LENGTH_UNKNOWN_MAX = 1024, /* bytes of a row where the source has none */
    LANES_128_CELLS = 32 * 1024,   /* the smallest block with 128 lanes; each lane costs a byte and a half */
    LANES_256_CELLS = 192 * 1024,
    LANES_128_CELLS_OF_PART = 16 * 1024, /* where others are stored: of one KV head lossless, 128 more are 0.4 % */
    LANES_256_CELLS_OF_PART = 32 * 1024,
    SAVED_LEAST = 32, /* coding must save more than this fraction of the bytes, or they are stored */
    SAMPLE_COLUMNS = 64,
    SAMPLE_STRETCH = 16, /* columns side by side */
};

struct ss_kvrans_encoder {
    struct ss_kvrans_plan plan;
    struct ss_kvrans_tables tables;
    struct ss_kvrans_alphabet alphabet;
    struct ss_kvrans_logs logs;
    _Alignas(64) uint16_t counts_of_part[SS_KVRANS_PART_MAX * SS_KVRANS_INDEX_MAX];
    uint8_t states_low[SS_KVRANS_LANES_MAX];
    uint8_t states_high[SS_KVRANS_LANES_MAX];
    uint8_t *buffer; /* cells, counts, planes, coded bytes, tables of columns */
    uint8_t *planes;
    uint8_t *coded; /* room for cells behind SS_KVRANS_ENCODE_SLACK */
    uint8_t *column_table;
    uint32_t columns_max; /* that 'buffer' has room for */
};

void ss_kvrans_encoder_free(struct ss_kvrans_encoder *encoder) {
    if (encoder != NULL) {
        free(encoder->buffer);
    }
    free(encoder);
}

/* encoder_find() returns this thread's encoder with room for blocks of 'columns', or NULL without memory. */
static struct ss_kvrans_encoder *encoder_find(uint32_t columns) {
    const size_t rounded = ((size_t)columns + 63) / 64 * 64, cells = rounded * SS_KVRANS_ROWS_MAX;
    const size_t counts = rounded * SS_KVRANS_INDEX_MAX * sizeof(uint16_t);
    const size_t planes = rounded * SS_KVRANS_SHIFT_MAX * SS_KVRANS_ROWS_MAX / 8;
    struct ss_codec_state *state = ss_codec_state();
    struct ss_kvrans_encoder *encoder;

    if (state == NULL) {
        return NULL;
    }
    if (state->kvrans_encoder == NULL) {
        state->kvrans_encoder = aligned_alloc(64, (sizeof *encoder + 63) / 64 * 64);
        if (state->kvrans_encoder == NULL) {
            return NULL;
        }
        memset(state->kvrans_encoder, 0, sizeof *encoder);
        state->kvrans_encoder->plan.counts_of_part = state->kvrans_encoder->counts_of_part;
        ss_kvrans_logs_make(&state->kvrans_encoder->logs);
    }
    encoder = state->kvrans_encoder;
    if (columns > encoder->columns_max) {
        uint8_t *buffer = aligned_alloc(64, 2 * cells + counts + planes + SS_KVRANS_ENCODE_SLACK + 2 * rounded);
        if (buffer == NULL) {
            return NULL;
        }
        free(encoder->buffer);
        encoder->buffer = encoder->plan.cells = buffer;
        encoder->plan.counts = (uint16_t *)(void *)(buffer + cells);
        encoder->planes = buffer + cells + counts;
        encoder->coded = encoder->planes + planes;
        encoder->column_table = encoder->coded + SS_KVRANS_ENCODE_SLACK + cells;
        encoder->plan.cells_scratch = encoder->column_table + rounded;
        encoder->plan.column_table = encoder->column_table;
        encoder->columns_max = (uint32_t)rounded;
    }
    return encoder;
}

/* ---- Sections of a block ------------------------------------------------------------------------------------- */

/* Bytes being written. Nothing is written behind 'end', but 'size' goes on. */
struct writer {
    uint8_t *start;
    size_t size;
    size_t space;
    uint64_t word; /* bits that are no whole byte yet */
    uint32_t bits;
};

static void put(struct writer *writer, const void *bytes, size_t size) {
    if (size <= writer->space && writer->size <= writer->space - size) {
        memcpy(writer->start + writer->size, bytes, size);
    }
    writer->size += size;
}

static void put_byte(struct writer *writer, uint32_t byte) {
    uint8_t value = (uint8_t)byte;
    put(writer, &value, 1);
}

/* put_bits() appends the lowest 'count' bits of 'value', at most 32, the lowest first. */
static void put_bits(struct writer *writer, uint32_t value, uint32_t count) {
    writer->word |= (uint64_t)value << writer->bits;
    writer->bits += count;
    if (writer->bits >= 32) {
        const uint8_t bytes[4] = {(uint8_t)writer->word, (uint8_t)(writer->word >> 8), (uint8_t)(writer->word >> 16),
                                  (uint8_t)(writer->word >> 24)};
        put(writer, bytes, sizeof bytes);
        writer->word >>= 32;
        writer->bits -= 32;
    }
}

/* put_padding() fills the last byte, and appends what put_bits() held back. */
static void put_padding(struct writer *writer) {
    for (; writer->bits > 0; writer->bits -= writer->bits < 8 ? writer->bits : 8) {
        put_byte(writer, (uint32_t)(writer->word & 255));
        writer->word >>= 8;
    }
}

/* frequency_length() returns the exponent of an Exponential-Golomb code of order 'order'. */
static uint32_t frequency_length(uint32_t frequency, uint32_t order) {
    return 31 - (uint32_t)__builtin_clz(frequency + (1u << order));
}

static void put_table(struct writer *writer, const uint8_t *frequency, uint32_t count) {
    uint32_t best = 0, least = UINT32_MAX;

    for (uint32_t order = 0; order < 4; order++) {
        uint32_t size = 0;
        for (uint32_t index = 0; index < count; index++) {
            size += 2 * frequency_length(frequency[index], order) - order + 1;
        }
        if (size < least) {
            least = size;
            best = order;
        }
    }
    put_bits(writer, best, 2);
    for (uint32_t index = 0; index < count; index++) {
        uint32_t length = frequency_length(frequency[index], best);
        put_bits(writer, 1u << (length - best), length - best + 1);
        put_bits(writer, frequency[index] + (1u << best) - (1u << length), length);
    }
}

/* encode_tables_make() derives what the kernels want from the frequencies. */
static void encode_tables_make(const struct ss_kvrans_tables *tables, struct ss_kvrans_plan *plan) {
    for (uint32_t number = 0; number < tables->count; number++) {
        struct ss_kvrans_encode_table *table = &plan->tables[number];
        uint32_t start = 0;
        memcpy(table->frequency, tables->frequency[number], sizeof(table->frequency));
        for (uint32_t index = 0; index < SS_KVRANS_INDEX_MAX; index++) {
            uint32_t frequency = table->frequency[index];
            uint32_t reciprocal = frequency > 1 ? 65536 / frequency : 65535;
            table->start[index] = (uint8_t)start;
            table->reciprocal_low[index] = (uint8_t)reciprocal;
            table->reciprocal_high[index] = (uint8_t)(reciprocal >> 8);
            start += frequency;
        }
    }
}

/* ---- Blocks and streams -------------------------------------------------------------------------------------- */

static void put_stored(struct writer *writer, const uint8_t *source, uint32_t rows, uint32_t columns) {
    put_byte(writer, SS_KVRANS_STORED);
    put_byte(writer, rows - 1);
    put(writer, source, (size_t)rows * columns);
}

/* put_coded() writes a block that was planned and whose coded bytes are there. */
static void put_coded(struct writer *writer, const struct ss_kvrans_encoder *encoder, const uint8_t *coded,
                      size_t coded_size) {
    const struct ss_kvrans_plan *plan = &encoder->plan;
    const struct ss_kvrans_alphabet *alphabet = &encoder->alphabet;
    const uint32_t states = plan->rows < plan->lanes ? plan->rows : plan->lanes;
    const size_t header = writer->size;
    uint8_t length[4];

    put_byte(writer, SS_KVRANS_CODED);
    put_byte(writer, plan->rows - 1);
    put_byte(writer,
             alphabet->shift | (ss_kvrans_bits(plan->lanes / SS_KVRANS_GROUP) << 2) | (encoder->tables.count - 1) << 4);
    put_byte(writer, (alphabet->count - 1) | (alphabet->listed ? SS_KVRANS_ALPHABET_LISTED : 0));
    put(writer, "\0\0\0\0", 4);
    put(writer, alphabet->value, alphabet->listed ? alphabet->count : 1);
    for (uint32_t column = 0; column < plan->columns; column++) {
        put_bits(writer, plan->column_table[column], ss_kvrans_bits(encoder->tables.count));
    }
    put_padding(writer);
    for (uint32_t table = 0; table < encoder->tables.count; table++) {
        put_table(writer, encoder->tables.frequency[table], alphabet->count);
    }
    put_padding(writer);
    put(writer, encoder->planes, (size_t)plan->columns * alphabet->shift * ((plan->rows + 7) / 8));
    put(writer, encoder->states_low, states);
    put(writer, encoder->states_high, states);
    put(writer, coded, coded_size);
    for (uint32_t byte = 0; byte < 4; byte++) {
        length[byte] = (uint8_t)((writer->size - header - SS_KVRANS_CODED_HEADER) >> 8 * byte);
    }
    if (header + SS_KVRANS_CODED_HEADER <= writer->space) {
        memcpy(writer->start + header + 4, length, 4);
    }
}

/*
 * pays() returns whether coding 'cells' bytes to 'size' is worth the decoding time. A plane of mantissas would save a
 * thousandth, but stored bytes need no decoding and are read in place.
 */
static int pays(uint64_t size, size_t cells) {
    return size + cells / SAVED_LEAST < cells;
}

/* block_plan() decides all about a block, whose place in memory and shape the plan has; returns about what it takes. */
static uint64_t block_plan(const struct ss_kvrans_kernels *kernels, struct ss_kvrans_encoder *encoder,
                           const uint8_t *source, size_t cells, const struct ss_kvrans_extremes *extremes) {
    ss_kvrans_alphabet_choose(kernels, extremes, source, cells, &encoder->alphabet);
    kernels->count(&encoder->plan, &encoder->alphabet);
    ss_kvrans_tables_choose(kernels, &encoder->logs, &encoder->plan, encoder->alphabet.count, encoder->column_table,
                            &encoder->tables);
    while (ss_kvrans_shift_more(&encoder->logs, cells, &encoder->alphabet, &encoder->tables)) {
        continue;
    }
    ss_kvrans_tables_align(&encoder->logs, encoder->alphabet.count, &encoder->tables);
    return encoder->tables.coded_bits / 8 + cells * encoder->alphabet.shift / 8;
}

/* sample_pays() returns whether some columns look worth coding, for a tenth of what all of them would take. */
static int sample_pays(const struct ss_kvrans_kernels *kernels, struct ss_kvrans_encoder *encoder,
                       const uint8_t *source, uint32_t rows, uint32_t columns) {
    const uint32_t apart = columns / (SAMPLE_COLUMNS / SAMPLE_STRETCH);
    uint8_t *sample = encoder->coded;
    struct ss_kvrans_extremes extremes;

    if (columns < 2 * SAMPLE_COLUMNS) {
        return 1;
    }
    for (uint32_t row = 0; row < rows; row++) {
        for (uint32_t column = 0; column < SAMPLE_COLUMNS; column += SAMPLE_STRETCH) {
            memcpy(sample + row * SAMPLE_COLUMNS + column,
                   source + (size_t)row * columns + column / SAMPLE_STRETCH * apart, SAMPLE_STRETCH);
        }
    }
    encoder->plan.columns = SAMPLE_COLUMNS;
    kernels->transpose(&encoder->plan, sample, &extremes);
    if (extremes.most - extremes.least < SS_KVRANS_INDEX_MAX ||
        extremes.signed_most - extremes.signed_least < SS_KVRANS_INDEX_MAX) {
        return 1;
    }
    return pays(block_plan(kernels, encoder, sample, (size_t)rows * SAMPLE_COLUMNS, &extremes),
                (size_t)rows * SAMPLE_COLUMNS);
}

/* block_pays() transposes and plans a block; returns whether it looks worth coding. If not, it may do neither. */
static int block_pays(const struct ss_kvrans_kernels *kernels, struct ss_kvrans_encoder *encoder, const uint8_t *source,
                      uint32_t rows, uint32_t columns) {
    const size_t cells = (size_t)rows * columns;
    struct ss_kvrans_extremes extremes;

    encoder->plan.rows = rows;
    if (!sample_pays(kernels, encoder, source, rows, columns)) {
        return 0;
    }
    encoder->plan.columns = columns;
    kernels->transpose(&encoder->plan, source, &extremes);
    return pays(block_plan(kernels, encoder, source, cells, &extremes), cells);
}

/*
 * lanes_choose() returns the number of lanes of a block. More lanes decode faster: each symbol of a lane waits for the
 * one before. 'last_stored': the last block of the stream is stored, mostly since it is a plane of mantissas, so that
 * lanes are a smaller part of the bytes.
 */
static uint32_t lanes_choose(uint32_t rows, uint32_t columns, int last_stored) {
    const size_t cells = (size_t)rows * columns;

    if (rows > 128 && cells >= (last_stored ? LANES_256_CELLS_OF_PART : LANES_256_CELLS)) {
        return 256;
    }
    return rows > 64 && cells >= (last_stored ? LANES_128_CELLS_OF_PART : LANES_128_CELLS) ? 128 : 64;
}

/* block_encode() appends one block, coded where that pays. */
static void block_encode(const struct ss_kvrans_kernels *kernels, struct ss_kvrans_encoder *encoder,
                         const uint8_t *source, uint32_t rows, uint32_t columns, int last_stored,
                         struct writer *writer) {
    struct ss_kvrans_plan *plan = &encoder->plan;
    const size_t cells = (size_t)rows * columns;
    const struct writer before = *writer;

    plan->lanes = lanes_choose(rows, columns, last_stored);
    if (block_pays(kernels, encoder, source, rows, columns)) {
        uint8_t *end = encoder->coded + SS_KVRANS_ENCODE_SLACK + cells, *coded;
        kernels->map(plan, &encoder->alphabet, encoder->planes);
        encode_tables_make(&encoder->tables, plan);
        coded = kernels->encode(plan, end, encoder->states_low, encoder->states_high);
        put_coded(writer, encoder, coded, (size_t)(end - coded));
        if (pays(writer->size - before.size, cells)) {
            return;
        }
    }
    *writer = before;
    put_stored(writer, source, rows, columns);
}

size_t ss_kvrans_compress_bound(size_t size) {
    /* All blocks stored: at worst 256 rows of one byte each. */
    return SS_KVRANS_STREAM_HEADER + size +
           SS_KVRANS_STORED_HEADER * ((size + SS_KVRANS_ROWS_MAX - 1) / SS_KVRANS_ROWS_MAX);
}

/* row_length_choose() returns the caller's, or one that makes blocks of 256 rows of a source without rows. */
static uint32_t row_length_choose(size_t size, size_t row_length) {
    size_t guess = (size + SS_KVRANS_ROWS_MAX - 1) / SS_KVRANS_ROWS_MAX;

    if (row_length >= 1 && row_length <= SS_KVRANS_ROW_MAX) {
        return (uint32_t)row_length;
    }
    guess = guess < 1 ? 1 : guess;
    return (uint32_t)(guess < ROW_LENGTH_UNKNOWN_MAX ? guess : ROW_LENGTH_UNKNOWN_MAX);
}

enum ss_result ss_kvrans_compress(const uint8_t *source, size_t size, size_t row_length, uint8_t *target,
                                  size_t target_size, size_t *written) {
    const struct ss_kvrans_kernels *kernels = ss_kvrans_kernels_find(ss_isa_active());
    const uint32_t columns = row_length_choose(size, row_length);
    struct ss_kvrans_encoder *encoder = encoder_find(columns);
    struct writer writer = {.start = target, .space = target_size};
    size_t rows = size / columns;
    int last_stored = 0;

    if (encoder == NULL) {
        return SS_NO_MEMORY;
    }
    put_byte(&writer, SS_KVRANS_VERSION);
    for (uint32_t byte = 0; byte < 3; byte++) {
        put_byte(&writer, columns >> 8 * byte);
    }
    if (rows > SS_KVRANS_ROWS_MAX &&
        lanes_choose(SS_KVRANS_ROWS_MAX, columns, 0) != lanes_choose(SS_KVRANS_ROWS_MAX, columns, 1)) {
        const size_t before = (rows - 1) / SS_KVRANS_ROWS_MAX * SS_KVRANS_ROWS_MAX;
        last_stored = !block_pays(kernels, encoder, source + before * columns, (uint32_t)(rows - before), columns);
    }
    while (rows > 0 && writer.size <= target_size) {
        uint32_t now = rows < SS_KVRANS_ROWS_MAX ? (uint32_t)rows : SS_KVRANS_ROWS_MAX;
        if (last_stored && now == rows) {
            put_stored(&writer, source, now, columns);
        } else {
            block_encode(kernels, encoder, source, now, columns, last_stored, &writer);
        }
        source += (size_t)now * columns;
        rows -= now;
    }
    put(&writer, source, size % columns);
    if (writer.size > target_size) {
        return SS_NO_SPACE;
    }
    *written = writer.size;
    return SS_OK;
}
