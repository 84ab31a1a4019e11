/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvrans.c - our own codec for quantized KV: reading streams
 *
 * A token's row of KV is a thousand channels, and each channel has a spread and a mean of its own. So a block is coded
 * column by column: all rows of a column share one table, which a vector register file can hold, and every lane of a
 * register is another row. What each byte of a stream means, and why, is in docs/design/kvrans.md.
 *
 * Streams are untrusted. A block is parsed completely before a kernel runs: every section is inside the source, tables
 * sum up, no index is outside its array. The kernel gets only the coded bytes. Any coded bytes decode to some symbols;
 * the kernel ensures that it does not read beyond their end.
 */
#include "codecs/kvrans/kvrans.h"

#include <stdlib.h>
#include <string.h>

#include "codecs/codec.h"
#include "quantize/quantize.h"

struct ss_kvrans_decoder {
    struct ss_kvrans_table tables[SS_KVRANS_TABLES_MAX];
    struct ss_kvrans_elements elements;
    struct ss_kvrans_tiles tiles;
    const struct ss_kvrans_kernels *left;        /* whose decode_planes() left columns in 'tiles'; or NULL */
    float scales[SS_KVRANS_ROWS_MAX];            /* one for each row of a block */
    uint8_t column_table[SS_KVRANS_ROW_MAX + 8]; /* unpacked eight at a time */
    _Alignas(64) float angles[SS_KVRANS_ANGLES];
};

static const char *implementation(void) {
    return ss_kvrans_kernels_find(ss_isa_active())->name;
}

/* ---- Sections of a block ------------------------------------------------------------------------------------- */

struct reader {
    const uint8_t *next;
    const uint8_t *end;
};

/* take() returns the next 'size' bytes, or NULL where there are fewer. */
static const uint8_t *take(struct reader *reader, size_t size) {
    const uint8_t *taken = reader->next;
    if ((size_t)(reader->end - reader->next) < size) {
        return NULL;
    }
    reader->next += size;
    return taken;
}

static uint32_t load32(const uint8_t *source) {
    return (uint32_t)source[0] | (uint32_t)source[1] << 8 | (uint32_t)source[2] << 16 | (uint32_t)source[3] << 24;
}

static uint64_t load64(const uint8_t *source) {
    return load32(source) | (uint64_t)load32(source + 4) << 32;
}

/*
 * values_read() reads the alphabet, of 'count' values: either the first of a range, which goes on from the largest
 * value with 0, or all of them in ascending order.
 */
static int values_read(struct reader *reader, struct ss_kvrans_block *block, uint32_t count, int listed) {
    const uint32_t limit = 256u >> block->shift;
    const uint8_t *values = take(reader, listed ? count : 1);

    if (values == NULL || values[0] >= limit) {
        return 0;
    }
    for (uint32_t index = 0; index < SS_KVRANS_INDEX_MAX; index++) {
        block->value[index] = (uint8_t)((values[0] + index) << block->shift);
    }
    for (uint32_t index = 1; listed && index < count; index++) {
        if (values[index] >= limit || values[index] <= values[index - 1]) {
            return 0;
        }
        block->value[index] = (uint8_t)(values[index] << block->shift);
    }
    return 1;
}

/* column_tables_read() unpacks one table number for each column, the lowest bits of a byte first. */
static int column_tables_read(struct reader *reader, uint32_t columns, uint32_t table_count, uint8_t *column_table) {
    const uint32_t bits = ss_kvrans_bits(table_count);
    const size_t size = ((size_t)columns * bits + 7) / 8;
    const uint8_t *packed = take(reader, size);
    const uint64_t fours = ((1ull << 4 * bits) - 1), twos = ((1ull << 2 * bits) - 1) * 0x0000000100000001;
    const uint64_t ones = ((1ull << bits) - 1) * 0x0001000100010001, bytes = 0x0101010101010101;
    const uint64_t mask = (1ull << 8 * bits) - 1;
    uint64_t over = 0;

    if (packed == NULL) {
        return 0;
    }
    for (uint32_t column = 0; column < columns; column += 8) {
        const size_t at = (size_t)column / 8 * bits; /* eight numbers are 'bits' whole bytes */
        uint64_t word = 0;
        uint8_t unpacked[8];
        if (size - at >= 8) {
            word = load64(packed + at) & mask;
        } else {
            for (size_t byte = 0; byte < bits && at + byte < size; byte++) {
                word |= (uint64_t)packed[at + byte] << 8 * byte;
            }
        }
        if (columns - column < 8 && word >> (columns - column) * bits != 0) {
            return 0; /* padding */
        }
        word = (word & fours) | (word >> 4 * bits) << 32;
        word = (word & twos) | (word >> 2 * bits & twos) << 16;
        word = (word & ones) | (word >> bits & ones) << 8;
        over |= word + (128 - table_count) * bytes; /* sets a byte's highest bit where its number is too large */
        for (uint32_t byte = 0; byte < 8; byte++) {
            unpacked[byte] = (uint8_t)(word >> 8 * byte);
        }
        memcpy(column_table + column, unpacked, 8);
    }
    return (over & 0x80 * bytes) == 0;
}

/* Bits of a section, the lowest bits of a byte first. */
struct bits {
    const uint8_t *next;
    const uint8_t *end;
    uint64_t word;
    uint32_t count; /* in 'word'; behind them are zeros, or some bits of 'next' */
    uint32_t short_of;
};

enum { BITS_FILLED = 56, FREQUENCY_BITS_MAX = 17 /* 8 zeros, a one, 8 bits */ };

/* bits_fill() gets at least BITS_FILLED bits into 'word', or all of the section. */
static void bits_fill(struct bits *bits) {
    if (bits->end - bits->next >= 8) {
        bits->word |= load64(bits->next) << bits->count;
        bits->next += (63 - bits->count) / 8;
        bits->count |= BITS_FILLED;
        return;
    }
    while (bits->count <= BITS_FILLED && bits->next < bits->end) {
        bits->word |= (uint64_t)*bits->next++ << bits->count;
        bits->count += 8;
    }
}

static uint32_t bits_take(struct bits *bits, uint32_t count) {
    uint32_t value = (uint32_t)(bits->word & ((1ull << count) - 1));
    if (count > bits->count) {
        bits->short_of = 1;
        return 0;
    }
    bits->word >>= count;
    bits->count -= count;
    return value;
}

/*
 * frequency_read() reads one Exponential-Golomb code of order 'order': zeros, a one, and as many bits as there were
 * zeros and 'order', from at least FREQUENCY_BITS_MAX filled bits. Returns 256 or more for what is no frequency.
 */
static uint32_t frequency_read(struct bits *bits, uint32_t order) {
    uint32_t zeros, length;
    uint64_t rest;

    zeros = bits->word != 0 ? (uint32_t)__builtin_ctzll(bits->word) : 64;
    length = zeros + order;
    if (length > 8) {
        return SS_KVRANS_SLOTS;
    }
    rest = bits->word >> (zeros + 1) & ((1ull << length) - 1);
    bits_take(bits, zeros + 1 + length);
    return (1u << length) + (uint32_t)rest - (1u << order);
}

/* table_read() reads one table of 'count' frequencies and lays it out for decoding. */
static int table_read(struct bits *bits, uint32_t count, struct ss_kvrans_table *table) {
    enum { TOGETHER = 64 };
    uint8_t *slots = (uint8_t *)table; /* 'index' is the first member; what is written behind it is overwritten below */
    _Static_assert(sizeof *table >= SS_KVRANS_SLOTS + TOGETHER, "room for the last symbol");
    uint8_t frequencies[SS_KVRANS_INDEX_MAX] = {0}, starts[SS_KVRANS_INDEX_MAX] = {0};
    uint32_t order, start = 0;

    bits_fill(bits);
    order = bits_take(bits, 2);
    for (uint32_t index = 0; index < count; index++) {
        uint32_t frequency;
        if (index % (BITS_FILLED / FREQUENCY_BITS_MAX) == 0) {
            bits_fill(bits);
        }
        frequency = frequency_read(bits, order);
        if (frequency >= SS_KVRANS_SLOTS || start + frequency > SS_KVRANS_SLOTS) {
            return 0;
        }
        frequencies[index] = (uint8_t)frequency;
        starts[index] = (uint8_t)start;
        for (uint32_t slot = 0; slot <= frequency; slot += TOGETHER) { /* mostly once, so that it is predicted */
            memset(slots + start + slot, (int)index, TOGETHER);
        }
        start += frequency;
    }
    memcpy(table->frequency, frequencies, sizeof frequencies);
    memcpy(table->start, starts, sizeof starts);
    return start == SS_KVRANS_SLOTS && !bits->short_of;
}

static int tables_read(struct reader *reader, uint32_t table_count, uint32_t index_count,
                       struct ss_kvrans_table *tables) {
    struct bits bits = {.next = reader->next, .end = reader->end};

    for (uint32_t table = 0; table < table_count; table++) {
        if (!table_read(&bits, index_count, &tables[table])) {
            return 0;
        }
    }
    reader->next = bits.next - bits.count / 8; /* give back whole bytes; the rest of the last one is padding */
    return bits.count % 8 == 0 || (bits.word & ((1u << bits.count % 8) - 1)) == 0;
}

/* states_read() finds the first states; none may be under SS_KVRANS_STATE_FIRST, so no high byte is 0. */
static int states_read(struct reader *reader, struct ss_kvrans_block *block) {
    const uint32_t count = block->rows < block->lanes ? block->rows : block->lanes;

    block->states_low = take(reader, count);
    block->states_high = take(reader, count);
    return block->states_low != NULL && block->states_high != NULL && memchr(block->states_high, 0, count) == NULL;
}

/* ---- Blocks and streams -------------------------------------------------------------------------------------- */

/* coded_parse() reads a coded block but for its type and rows, and everything in it but the coded bytes. */
static int coded_parse(struct reader *reader, struct ss_kvrans_decoder *decoder, struct ss_kvrans_block *block) {
    const uint8_t *header = take(reader, SS_KVRANS_CODED_HEADER - 2);
    const uint8_t *body = header != NULL ? take(reader, load32(header + 2)) : NULL;
    struct reader section = {.next = body, .end = reader->next};
    uint32_t layout, table_count, index_count;

    if (body == NULL) {
        return 0;
    }
    layout = header[0];
    block->shift = layout & 3;
    block->lanes = SS_KVRANS_GROUP << (layout >> 2 & 3);
    table_count = (layout >> 4) + 1;
    index_count = (header[1] & 63) + 1;
    if (block->lanes > SS_KVRANS_LANES_MAX || (header[1] & 64) != 0 ||
        !values_read(&section, block, index_count, header[1] & SS_KVRANS_ALPHABET_LISTED) ||
        !column_tables_read(&section, block->columns, table_count, decoder->column_table) ||
        !tables_read(&section, table_count, index_count, decoder->tables)) {
        return 0;
    }
    block->planes = take(&section, (size_t)block->columns * block->shift * ((block->rows + 7) / 8));
    if (block->planes == NULL || !states_read(&section, block)) {
        return 0;
    }
    block->count = index_count;
    block->tables = decoder->tables;
    block->column_table = decoder->column_table;
    block->coded = section.next;
    block->coded_size = (size_t)(section.end - section.next);
    return 1;
}

/*
 * block_parse() reads the next block, of at most 'rows_left' rows. '*stored' is where its bytes are, or NULL where they
 * are coded.
 */
static int block_parse(struct reader *reader, struct ss_kvrans_decoder *decoder, uint32_t columns, size_t rows_left,
                       struct ss_kvrans_block *block, const uint8_t **stored) {
    const uint8_t *header = take(reader, SS_KVRANS_STORED_HEADER);

    *block = (struct ss_kvrans_block){.columns = columns};
    *stored = NULL;
    if (header == NULL) {
        return 0;
    }
    block->rows = (uint32_t)header[1] + 1;
    if (block->rows > rows_left) {
        return 0;
    }
    if (header[0] == SS_KVRANS_STORED) {
        *stored = take(reader, (size_t)block->rows * columns);
        return *stored != NULL;
    }
    return header[0] == SS_KVRANS_CODED && coded_parse(reader, decoder, block);
}

/* block_decode() writes the symbols of a block that was parsed. */
static enum ss_result block_decode(const struct ss_kvrans_block *block, const uint8_t *stored, uint8_t *target) {
    if (stored == NULL) {
        return ss_kvrans_kernels_find(ss_isa_active())->decode(block, target);
    }
    memcpy(target, stored, (size_t)block->rows * block->columns);
    return SS_OK;
}

static struct ss_kvrans_decoder *decoder_find(void) {
    struct ss_codec_state *state = ss_codec_state();

    if (state != NULL && state->kvrans_decoder == NULL) {
        state->kvrans_decoder = aligned_alloc(64, (sizeof(struct ss_kvrans_decoder) + 63) / 64 * 64);
        if (state->kvrans_decoder != NULL) {
            memset(state->kvrans_decoder, 0, sizeof(struct ss_kvrans_decoder));
        }
    }
    return state != NULL ? state->kvrans_decoder : NULL;
}

/* header_read() returns how many columns the rows of a stream have, or 0 for what is none. */
static uint32_t header_read(struct reader *reader) {
    const uint8_t *header = take(reader, SS_KVRANS_STREAM_HEADER);
    uint32_t columns;

    if (header == NULL || header[0] != SS_KVRANS_VERSION) {
        return 0;
    }
    columns = load32(header) >> 8;
    return columns <= SS_KVRANS_ROW_MAX ? columns : 0;
}

static enum ss_result decompress(const uint8_t *source, size_t size, uint8_t *target, size_t target_size) {
    struct ss_kvrans_decoder *decoder = decoder_find();
    struct reader reader = {.next = source, .end = source + size};
    const uint32_t columns = header_read(&reader);
    const uint8_t *rest, *stored;
    struct ss_kvrans_block block;

    if (decoder == NULL) {
        return SS_NO_MEMORY;
    }
    if (columns == 0) {
        return SS_BAD_DATA;
    }
    for (size_t rows_left = target_size / columns; rows_left > 0; rows_left -= block.rows) {
        enum ss_result result = SS_BAD_DATA;
        if (block_parse(&reader, decoder, columns, rows_left, &block, &stored)) {
            result = block_decode(&block, stored, target);
        }
        if (result != SS_OK) {
            return result;
        }
        target += (size_t)block.rows * columns;
    }
    rest = take(&reader, target_size % columns);
    if (rest == NULL || reader.next != reader.end) {
        return SS_BAD_DATA;
    }
    memcpy(target, rest, target_size % columns);
    return SS_OK;
}

/* ---- Elements ------------------------------------------------------------------------------------------------ */

static int scales_finite(const struct ss_elements *elements) {
    const size_t count = (elements->vectors + elements->scale_vectors - 1) / elements->scale_vectors;
    uint32_t most = 0;

    for (size_t index = 0; index < count; index++) {
        uint32_t magnitude = ss_load32(elements->scales, index) & 0x7FFFFFFFu;
        most = magnitude > most ? magnitude : most;
    }
    return most < SS_FLOAT32_INFINITY;
}

/* block_ahead() gives a block, which begins with 'row' of the stream's 'rows', its share of what is read next. */
static void block_ahead(struct ss_kvrans_block *block, const struct ss_stream *next, size_t row, size_t rows) {
    if (next != NULL && next->source_size != 0) {
        const size_t share = next->source_size / rows; /* of each row */
        block->next = (const uint8_t *)next->source + share * row;
        block->next_size = share * block->rows;
    }
}

/* block_elements() writes the elements of a block whose first row is vector 'first'; 'symbols' is a scratch. */
static enum ss_result block_elements(const struct ss_kvrans_block *block, const uint8_t *stored,
                                     const struct ss_elements *elements, size_t first,
                                     struct ss_kvrans_decoder *decoder, uint8_t *symbols) {
    const struct ss_kvrans_kernels *kernels = ss_kvrans_kernels_find(ss_isa_active());
    uint8_t *target = (uint8_t *)elements->target + first * block->columns * ss_dtype_size(elements->dtype);
    enum ss_result result;

    for (uint32_t row = 0; row < block->rows; row++) {
        decoder->scales[row] = ss_float_of_bits(ss_load32(elements->scales, (first + row) / elements->scale_vectors));
    }
    if (stored == NULL && ss_kvrans_entries_fit(block) && ss_kvrans_elements_fit(block, target)) {
        return kernels->decode_elements(block, elements->dtype, decoder->scales, &decoder->elements, target);
    }
    result = block_decode(block, stored, symbols);
    if (result != SS_OK) {
        return result;
    }
    return ss_dequantize_streamed(SS_QUANTIZER_BINNED, elements->dtype, symbols, decoder->scales, block->rows,
                                  block->columns, target);
}

static enum ss_result blocks_elements(struct reader *reader, struct ss_kvrans_decoder *decoder,
                                      const struct ss_stream *next, const struct ss_elements *elements,
                                      uint8_t *symbols) {
    struct ss_kvrans_block block;
    const uint8_t *stored;

    for (size_t row = 0; row < elements->vectors; row += block.rows) {
        enum ss_result result = SS_BAD_DATA;
        if (block_parse(reader, decoder, (uint32_t)elements->vector_length, elements->vectors - row, &block, &stored)) {
            block_ahead(&block, next, row, elements->vectors);
            result = block_elements(&block, stored, elements, row, decoder, symbols);
        }
        if (result != SS_OK) {
            return result;
        }
    }
    return reader->next == reader->end ? SS_OK : SS_BAD_DATA;
}

/* ---- Lossless elements --------------------------------------------------------------------------------------- */

struct plane_readers {
    struct reader of[4];
    uint32_t count;
};

/*
 * planes_find() finds where each plane begins. SS_NOT_SUPPORTED unless all blocks are of 256 rows, and coded where they
 * are of the first plane.
 */
static enum ss_result planes_find(struct reader reader, uint32_t columns, size_t blocks,
                                  struct plane_readers *readers) {
    for (uint32_t plane = 0; plane < readers->count; plane++) {
        readers->of[plane] = reader;
        for (size_t block = 0; block < blocks; block++) {
            const uint8_t *header = take(&reader, SS_KVRANS_STORED_HEADER), *length = NULL, *body;
            if (header != NULL && header[1] != SS_KVRANS_ROWS_MAX - 1) {
                return SS_NOT_SUPPORTED;
            }
            if (header != NULL && header[0] == SS_KVRANS_STORED && plane == 0) {
                return SS_NOT_SUPPORTED;
            }
            if (header != NULL && header[0] == SS_KVRANS_CODED) {
                length = take(&reader, SS_KVRANS_CODED_HEADER - SS_KVRANS_STORED_HEADER);
            }
            if (header == NULL || (header[0] != SS_KVRANS_STORED && length == NULL)) {
                return SS_BAD_DATA;
            }
            body = take(&reader, length != NULL ? load32(length + 2) : (size_t)SS_KVRANS_ROWS_MAX * columns);
            if (body == NULL) {
                return SS_BAD_DATA;
            }
        }
    }
    return reader.next == reader.end ? SS_OK : SS_BAD_DATA;
}

/* left_write() writes what the last decode_planes() left. */
static void left_write(struct ss_kvrans_decoder *decoder) {
    if (decoder->left != NULL) {
        decoder->left->tiles_write(&decoder->tiles);
        decoder->left = NULL;
    }
}

/*
 * planes_block() makes the elements of the next block of each plane, from vector 'row' on. Lower planes that are coded
 * go to 'symbols', where those of the next block will be, too: then nothing may be left.
 */
static enum ss_result planes_block(struct plane_readers *readers, struct ss_kvrans_decoder *decoder,
                                   const struct ss_stream *next, const struct ss_elements *elements, size_t row,
                                   uint8_t *symbols) {
    const uint32_t columns = (uint32_t)elements->vector_length;
    uint8_t *target = (uint8_t *)elements->target + row * columns * readers->count;
    const struct ss_kvrans_kernels *kernels = ss_kvrans_kernels_find(ss_isa_active());
    struct ss_kvrans_planes planes = {.count = readers->count};
    enum ss_result result;
    struct ss_kvrans_block block;
    const uint8_t *stored;
    int all_stored = 1;

    for (uint32_t plane = readers->count; plane-- > 1;) {
        uint8_t *place = symbols + (size_t)(plane - 1) * SS_KVRANS_ROWS_MAX * columns;
        result = SS_BAD_DATA;
        if (block_parse(&readers->of[plane], decoder, columns, SS_KVRANS_ROWS_MAX, &block, &stored)) {
            result = stored != NULL ? SS_OK : block_decode(&block, NULL, place);
        }
        if (result != SS_OK) {
            return result;
        }
        all_stored &= stored != NULL;
        planes.lower[plane - 1] = stored != NULL ? stored : place;
    }
    if (!block_parse(&readers->of[0], decoder, columns, SS_KVRANS_ROWS_MAX, &block, &stored)) {
        return SS_BAD_DATA;
    }
    block_ahead(&block, next, row, elements->vectors);
    if (decoder->left != kernels) {
        left_write(decoder);
    }
    result = kernels->decode_planes(&block, &planes, &decoder->tiles, target);
    decoder->left = kernels->tiles_write != NULL ? kernels : NULL;
    if (!all_stored) {
        left_write(decoder);
    }
    return result;
}

/* planes_elements() makes lossless elements; where it returns SS_NOT_SUPPORTED, it did nothing. */
static enum ss_result planes_elements(const struct reader *reader, struct ss_kvrans_decoder *decoder,
                                      const struct ss_stream *next, const struct ss_elements *elements,
                                      uint8_t *symbols) {
    const uint32_t columns = (uint32_t)elements->vector_length;
    const size_t blocks = elements->vectors / SS_KVRANS_ROWS_MAX;
    struct plane_readers readers = {.count = (uint32_t)ss_dtype_size(elements->dtype)};
    enum ss_result result = SS_NOT_SUPPORTED;

    if (elements->vectors % SS_KVRANS_ROWS_MAX == 0) {
        result = planes_find(*reader, columns, blocks, &readers);
    }
    for (size_t row = 0; result == SS_OK && row < elements->vectors; row += SS_KVRANS_ROWS_MAX) {
        result = planes_block(&readers, decoder, next, elements, row, symbols);
    }
    return result;
}

/* ---- Elements of 'weighted' ---------------------------------------------------------------------------------- */

/* width_of() returns how many columns are whole heads and lines of memory, or 0 where no kernel takes such elements. */
static uint32_t width_of(const struct ss_elements *elements) {
    const struct ss_channels *channels = elements->channels;
    const uint32_t pairs = elements->row % channels->kinds == 0 ? channels->pairs : 0;
    const uint32_t width = pairs != 0 ? channels->head_length : SS_KVRANS_GROUP;

    if (ss_dtype_size(elements->dtype) != 2 || (width != SS_KVRANS_GROUP && width != SS_KVRANS_WIDTH_MAX) ||
        (pairs != 0 && 2 * pairs != width)) {
        return 0;
    }
    return width;
}

/* weighted_elements() makes elements block by block. */
static enum ss_result weighted_elements(struct reader *reader, struct ss_kvrans_decoder *decoder,
                                        const struct ss_stream *next, const struct ss_elements *elements,
                                        uint8_t *symbols) {
    struct ss_weighted slice;
    struct ss_kvrans_weighted weighted = {
        .slice = &slice, .elements = elements, .angles = decoder->angles, .width = width_of(elements)};
    struct ss_kvrans_block block;
    const uint8_t *stored;
    enum ss_result result = ss_unweigh_begin(&slice, elements);

    for (size_t row = 0; result == SS_OK && row < elements->vectors; row += block.rows) {
        if (!block_parse(reader, decoder, (uint32_t)elements->vector_length, elements->vectors - row, &block,
                         &stored)) {
            return SS_BAD_DATA;
        }
        block_ahead(&block, next, row, elements->vectors);
        if (stored == NULL && ss_kvrans_elements_fit(&block, elements->target) && row % SS_TURNS == 0) {
            weighted.vector = row;
            result = ss_kvrans_kernels_find(ss_isa_active())->decode_weighted(&block, &weighted);
        } else {
            result = block_decode(&block, stored, symbols);
            ss_unweigh(&slice, elements, symbols, row, block.rows, 1);
        }
    }
    if (result == SS_OK) {
        result = reader->next == reader->end ? SS_OK : SS_BAD_DATA;
        ss_unweigh_end(&slice, elements);
    }
    return result;
}

/* direct_fits() returns whether there are kernels for such elements, if their blocks are as the encoder makes them. */
static int direct_fits(const struct ss_stream *stream, const struct ss_elements *elements) {
    const struct ss_kvrans_block likely = {.rows = SS_KVRANS_ROWS_MAX, .columns = (uint32_t)elements->vector_length};
    const struct ss_kvrans_kernels *kernels = ss_kvrans_kernels_find(ss_isa_active());
    const size_t size = ss_dtype_size(elements->dtype);

    if (elements->vectors < SS_KVRANS_ROWS_MAX || !ss_kvrans_elements_fit(&likely, elements->target) ||
        stream->source == NULL || stream->target == NULL) {
        return 0;
    }
    if (elements->quantizer == SS_QUANTIZER_LOSSLESS) {
        return kernels->decode_planes != NULL && size != 0 &&
               stream->target_size == elements->vectors * elements->vector_length * size;
    }
    if (elements->quantizer == SS_QUANTIZER_WEIGHTED) {
        return kernels->decode_weighted != NULL &&
               ss_channels_fit(elements->channels, elements->dtype, elements->vector_length) &&
               width_of(elements) != 0 && elements->vector_length % width_of(elements) == 0;
    }
    return kernels->decode_elements != NULL && elements->quantizer == SS_QUANTIZER_BINNED &&
           (elements->dtype == SS_DTYPE_FLOAT16 || elements->dtype == SS_DTYPE_BFLOAT16);
}

enum ss_result ss_kvrans_decode(const struct ss_stream *stream, const struct ss_stream *next,
                                const struct ss_elements *elements) {
    struct reader reader = {.next = stream->source, .end = (const uint8_t *)stream->source + stream->source_size};
    struct ss_kvrans_decoder *decoder = decoder_find();
    enum ss_result result;

    if (decoder == NULL) {
        return SS_NOT_SUPPORTED; /* in two steps it may work, or they say what is wrong */
    }
    if (elements->quantizer != SS_QUANTIZER_LOSSLESS) {
        left_write(decoder);
    }
    if (!direct_fits(stream, elements) || header_read(&reader) != elements->vector_length) {
        result = SS_NOT_SUPPORTED;
    } else if (elements->quantizer == SS_QUANTIZER_LOSSLESS) {
        result = planes_elements(&reader, decoder, next, elements, stream->target);
    } else if (elements->quantizer == SS_QUANTIZER_WEIGHTED) {
        result = weighted_elements(&reader, decoder, next, elements, stream->target);
    } else if (scales_finite(elements)) {
        result = blocks_elements(&reader, decoder, next, elements, stream->target);
    } else {
        result = SS_BAD_DATA;
    }
    if (result != SS_OK || next == NULL) {
        left_write(decoder);
    }
    ss_streams_order();
    return result;
}

void ss_kvrans_decode_end(void) {
    struct ss_codec_state *state = ss_codec_state();

    if (state != NULL && state->kvrans_decoder != NULL) {
        left_write(state->kvrans_decoder);
        ss_streams_order();
    }
}

static void state_free(struct ss_codec_state *state) {
    free(state->kvrans_decoder);
    ss_kvrans_encoder_free(state->kvrans_encoder);
}

const struct ss_codec_functions ss_codec_kvrans = {
    .implementation_now = implementation,
    .compress_bound = ss_kvrans_compress_bound,
    .compress = ss_kvrans_compress,
    .decompress = decompress,
    .state_free = state_free,
};
