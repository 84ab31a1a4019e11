/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_kvrans_kernels.c - every variant of the kvrans kernels does what the scalar ones do, byte for byte
 *
 * Blocks of random shapes, tables, lanes and shifts, with every section right before a page that cannot be touched, and
 * coded bytes that are as the encoder made them, changed, cut or too many.
 */
#include "check.h"
#include "codecs/kvrans/kvrans.h"

enum { BLOCKS = 400, COLUMNS_MAX = 200, CELLS = COLUMNS_MAX * SS_KVRANS_ROWS_MAX };

static const char *const isa_names[] = {"scalar", "avx2", "avx512", "neon"};

/* Kinds of test blocks. */
struct sample {
    struct ss_kvrans_table tables[SS_KVRANS_TABLES_MAX];
    struct ss_kvrans_plan plan;
    struct ss_kvrans_block block;
    uint8_t column_table[COLUMNS_MAX];
    uint8_t states_low[SS_KVRANS_LANES_MAX];
    uint8_t states_high[SS_KVRANS_LANES_MAX];
    uint32_t table_count;
    uint32_t index_count;
};

static struct guarded coded_guarded, planes_guarded, target_guarded, states_guarded;
static _Alignas(64) uint8_t cells[CELLS], cells_of_variant[CELLS], expected[CELLS];
static uint8_t coded_buffer[SS_KVRANS_ENCODE_SLACK + CELLS], coded_of_variant[SS_KVRANS_ENCODE_SLACK + CELLS];

/* table_make() fills one table: at least two symbols, some of them without any slot, from even to very uneven. */
static void table_make(struct sample *sample, uint32_t number) {
    struct ss_kvrans_table *table = &sample->tables[number];
    struct ss_kvrans_encode_table *encode = &sample->plan.tables[number];
    uint32_t left = SS_KVRANS_SLOTS, start = 0;
    uint32_t frequencies[SS_KVRANS_INDEX_MAX] = {0};

    frequencies[random_below(sample->index_count)]++;
    left--;
    while (left > 0) {
        uint32_t index = (uint32_t)random_below(sample->index_count), most = 255 - frequencies[index];
        uint32_t more = 1 + (uint32_t)random_below(random_below(4) == 0 ? left : left / 8 + 1);
        more = more < most ? more : most;
        frequencies[index] += more;
        left -= more;
    }
    memset(table, 0, sizeof *table);
    memset(encode, 0, sizeof *encode);
    for (uint32_t index = 0; index < sample->index_count; index++) {
        uint32_t frequency = frequencies[index], reciprocal = frequency > 1 ? 65536 / frequency : 65535;
        memset(table->index + start, (int)index, frequency);
        table->frequency[index] = encode->frequency[index] = (uint8_t)frequency;
        table->start[index] = encode->start[index] = (uint8_t)(frequency != 0 ? start : 0);
        encode->reciprocal_low[index] = (uint8_t)reciprocal;
        encode->reciprocal_high[index] = (uint8_t)(reciprocal >> 8);
        start += frequency;
    }
}

/* sample_make() makes a block's shape, tables and indices; the indices as likely as their tables say. */
static void sample_make(struct sample *sample) {
    static const uint32_t rows_often[] = {1, 31, 32, 33, 63, 64, 65, 128, 255, 256};
    struct ss_kvrans_plan *plan = &sample->plan;

    sample->index_count = 2 + (uint32_t)random_below(random_below(2) ? 15 : 63);
    sample->table_count = 1 + (uint32_t)random_below(SS_KVRANS_TABLES_MAX);
    plan->rows = random_below(2) ? rows_often[random_below(10)] : 1 + (uint32_t)random_below(SS_KVRANS_ROWS_MAX);
    plan->columns = 1 + (uint32_t)random_below(random_below(2) ? COLUMNS_MAX : 40);
    plan->lanes = (uint32_t)SS_KVRANS_GROUP << random_below(3);
    plan->cells = cells;
    plan->column_table = sample->column_table;
    for (uint32_t number = 0; number < sample->table_count; number++) {
        table_make(sample, number);
    }
    for (uint32_t column = 0; column < plan->columns; column++) {
        const struct ss_kvrans_table *table;
        sample->column_table[column] = (uint8_t)random_below(sample->table_count);
        table = &sample->tables[sample->column_table[column]];
        for (uint32_t row = 0; row < SS_KVRANS_ROWS_MAX;
             row++) { /* behind the last row, too: it has to be of no meaning */
            cells[column * SS_KVRANS_ROWS_MAX + row] = table->index[random_below(SS_KVRANS_SLOTS)];
        }
    }
}

/* guarded_copy() puts bytes right before the page that cannot be touched. */
static const uint8_t *guarded_copy(const struct guarded *guarded, const void *bytes, size_t size) {
    uint8_t *place = guarded->end - size;
    memcpy(place, bytes, size);
    return place;
}

/* block_make() makes the decoder's view of the sample; the coded bytes are those at 'coded'. */
static void block_make(struct sample *sample, const uint8_t *coded, size_t coded_size) {
    static uint8_t planes[COLUMNS_MAX * SS_KVRANS_SHIFT_MAX * SS_KVRANS_ROWS_MAX / 8];
    const struct ss_kvrans_plan *plan = &sample->plan;
    const uint32_t states = plan->rows < plan->lanes ? plan->rows : plan->lanes;
    struct ss_kvrans_block *block = &sample->block;
    size_t planes_size;
    uint8_t both[2 * SS_KVRANS_LANES_MAX];

    block->rows = plan->rows;
    block->columns = plan->columns;
    block->lanes = plan->lanes;
    block->shift = (uint32_t)random_below(SS_KVRANS_SHIFT_MAX + 1);
    block->tables = sample->tables;
    block->column_table = sample->column_table;
    for (uint32_t index = 0; index < SS_KVRANS_INDEX_MAX; index++) {
        block->value[index] = (uint8_t)(random64() << block->shift);
    }
    planes_size = (size_t)plan->columns * block->shift * ((plan->rows + 7) / 8);
    random_fill(planes, planes_size);
    block->planes = guarded_copy(&planes_guarded, planes, planes_size);
    memcpy(both, sample->states_low, states);
    memcpy(both + states, sample->states_high, states);
    block->states_low = guarded_copy(&states_guarded, both, 2 * states);
    block->states_high = block->states_low + states;
    block->coded = guarded_copy(&coded_guarded, coded, coded_size);
    block->coded_size = coded_size;
}

/* ---- Decode -------------------------------------------------------------------------------------------------- */

/* decode_compare() decodes the block by both kernels and compares what becomes of it. */
static enum ss_result decode_compare(const struct ss_kvrans_kernels *kernels, const struct ss_kvrans_block *block) {
    const size_t size = (size_t)block->rows * block->columns;
    uint8_t *target = guarded_place(&target_guarded, size, (int)random_below(2));
    const enum ss_result wanted = ss_kvrans_kernels_scalar.decode(block, expected);
    const enum ss_result result = kernels->decode(block, target);

    CHECK(result == wanted, "%s: %d, not %d, for %u rows, %u columns, %u lanes", kernels->name, (int)result,
          (int)wanted, block->rows, block->columns, block->lanes);
    CHECK(result != SS_OK || memcmp(target, expected, size) == 0, "%s: %u rows, %u columns, %u lanes, shift %u",
          kernels->name, block->rows, block->columns, block->lanes, block->shift);
    return result;
}

/* decode_damaged() changes, cuts or extends the coded bytes. */
static void decode_damaged(const struct ss_kvrans_kernels *kernels, struct sample *sample, const uint8_t *coded,
                           size_t size) {
    static uint8_t damaged[CELLS + 16];

    memcpy(damaged, coded, size);
    if (size > 0) {
        damaged[random_below(size)] ^= (uint8_t)(1 + random_below(255));
    }
    block_make(sample, damaged, size);
    decode_compare(kernels, &sample->block);
    block_make(sample, coded, size > 0 ? random_below(size) : 0);
    CHECK(size == 0 || decode_compare(kernels, &sample->block) == SS_BAD_DATA, "%s: cut", kernels->name);
    memcpy(damaged, coded, size);
    random_fill(damaged + size, 16);
    block_make(sample, damaged, size + 1 + random_below(16));
    CHECK(decode_compare(kernels, &sample->block) == SS_BAD_DATA, "%s: too long", kernels->name);
    random_fill(sample->states_high, sizeof(sample->states_high));
    for (uint32_t lane = 0; lane < SS_KVRANS_LANES_MAX; lane++) {
        sample->states_high[lane] |= 1;
    }
    block_make(sample, coded, size);
    decode_compare(kernels, &sample->block);
}

/* ---- Encode -------------------------------------------------------------------------------------------------- */

static void encode_compare(const struct ss_kvrans_kernels *kernels, struct sample *sample, const uint8_t *coded,
                           size_t size) {
    struct ss_kvrans_plan *plan = &sample->plan;
    const uint32_t states = plan->rows < plan->lanes ? plan->rows : plan->lanes;
    uint8_t *end = coded_of_variant + SS_KVRANS_ENCODE_SLACK + (size_t)plan->rows * plan->columns;
    uint8_t low[SS_KVRANS_LANES_MAX], high[SS_KVRANS_LANES_MAX];
    uint8_t *start = kernels->encode(plan, end, low, high);

    CHECK((size_t)(end - start) == size && memcmp(start, coded, size) == 0, "%s: coded %zu bytes, not %zu",
          kernels->name, (size_t)(end - start), size);
    CHECK(memcmp(low, sample->states_low, states) == 0 && memcmp(high, sample->states_high, states) == 0, "%s: states",
          kernels->name);
}

/* prepare_compare() does all that comes before encode(). */
static void prepare_compare(const struct ss_kvrans_kernels *kernels, const struct sample *sample) {
    static _Alignas(64) uint16_t counts[2][COLUMNS_MAX * SS_KVRANS_INDEX_MAX];
    static uint8_t planes[2][COLUMNS_MAX * SS_KVRANS_SHIFT_MAX * SS_KVRANS_ROWS_MAX / 8];
    static struct ss_kvrans_costs costs;
    static uint32_t totals[2][SS_KVRANS_TABLES_MAX][SS_KVRANS_INDEX_MAX];
    uint8_t column_table[2][COLUMNS_MAX], present[2][256] = {{0}};
    struct ss_kvrans_plan plan[2] = {sample->plan, sample->plan};
    struct ss_kvrans_alphabet alphabet = {.shift = (uint32_t)random_below(SS_KVRANS_SHIFT_MAX + 1),
                                          .listed = (uint32_t)random_below(2)};
    struct ss_kvrans_extremes extremes[2];
    const size_t size = (size_t)sample->plan.rows * sample->plan.columns;
    uint8_t *source = guarded_place(&target_guarded, size, (int)random_below(2));
    const uint32_t limit = 256u >> alphabet.shift;

    alphabet.count = 2 + (uint32_t)random_below((limit < SS_KVRANS_INDEX_MAX ? limit : SS_KVRANS_INDEX_MAX) - 1);
    alphabet.value[0] = (uint8_t)random_below(alphabet.listed ? limit - alphabet.count + 1 : limit);
    for (uint32_t index = 0; index < alphabet.count; index++) {
        uint32_t value = (alphabet.value[0] + index) % limit;
        alphabet.value[index] = (uint8_t)value;
        alphabet.index[value] = (uint8_t)index;
    }
    for (size_t cell = 0; cell < size; cell++) {
        source[cell] = (uint8_t)((uint32_t)alphabet.value[random_below(alphabet.count)] << alphabet.shift |
                                 random_below(1u << alphabet.shift));
    }
    for (size_t pair = 0; pair < sizeof(costs) / sizeof(int16_t); pair++) {
        (&costs.cost[0][0][0])[pair] = (int16_t)random_below(random_below(2) ? 0x4000 : 4);
    }
    for (int side = 0; side < 2; side++) {
        const struct ss_kvrans_kernels *used = side ? kernels : &ss_kvrans_kernels_scalar;
        plan[side].cells = side ? cells_of_variant : cells;
        plan[side].counts = counts[side];
        used->transpose(&plan[side], source, &extremes[side]);
        used->present(source, size, present[side]);
        used->count(&plan[side], &alphabet);
        used->map(&plan[side], &alphabet, planes[side]);
        memset(totals[side], 0, sizeof(totals[side]));
        used->total(&plan[side], sample->column_table, alphabet.count, totals[side]);
        used->assign(&plan[side], &costs, alphabet.count, column_table[side]);
    }
    CHECK(memcmp(&extremes[0], &extremes[1], sizeof(extremes[0])) == 0, "%s: extremes", kernels->name);
    CHECK(memcmp(present[0], present[1], sizeof(present[0])) == 0, "%s: bytes present", kernels->name);
    CHECK(memcmp(planes[0], planes[1], (size_t)plan[0].columns * alphabet.shift * ((sample->plan.rows + 7) / 8)) == 0,
          "%s: planes", kernels->name);
    for (uint32_t column = 0; column < plan[0].columns; column++) {
        CHECK(memcmp(cells + column * SS_KVRANS_ROWS_MAX, cells_of_variant + column * SS_KVRANS_ROWS_MAX,
                     plan[0].rows) == 0,
              "%s: indices of %u rows", kernels->name, plan[0].rows);
        CHECK(memcmp(counts[0] + column * SS_KVRANS_INDEX_MAX, counts[1] + column * SS_KVRANS_INDEX_MAX,
                     alphabet.count * sizeof(uint16_t)) == 0,
              "%s: counts of %u rows", kernels->name, plan[0].rows);
    }
    for (uint32_t table = 0; table < SS_KVRANS_TABLES_MAX; table++) {
        CHECK(memcmp(totals[0][table], totals[1][table], alphabet.count * sizeof(uint32_t)) == 0, "%s: totals",
              kernels->name);
    }
    CHECK(memcmp(column_table[0], column_table[1], plan[0].columns) == 0, "%s: tables", kernels->name);
}

static void test_kernels(const struct ss_kvrans_kernels *kernels) {
    static struct sample sample;

    for (int trial = 0; trial < BLOCKS; trial++) {
        uint8_t *end, *coded;
        sample_make(&sample);
        end = coded_buffer + SS_KVRANS_ENCODE_SLACK + (size_t)sample.plan.rows * sample.plan.columns;
        coded = ss_kvrans_kernels_scalar.encode(&sample.plan, end, sample.states_low, sample.states_high);
        encode_compare(kernels, &sample, coded, (size_t)(end - coded));
        block_make(&sample, coded, (size_t)(end - coded));
        CHECK(decode_compare(kernels, &sample.block) == SS_OK, "%s: a good block", kernels->name);
        decode_damaged(kernels, &sample, coded, (size_t)(end - coded));
        prepare_compare(kernels, &sample);
    }
}

int main(void) {
    coded_guarded = guarded_make(CELLS + 16);
    planes_guarded = guarded_make(CELLS);
    target_guarded = guarded_make(CELLS);
    states_guarded = guarded_make(2 * SS_KVRANS_LANES_MAX);
    FOR_EACH_ISA (isa) {
        test_kernels(ss_kvrans_kernels_find(isa));
        printf("%s: %s\n", isa_names[isa], ss_kvrans_kernels_find(isa)->name);
    }
    guarded_free(&coded_guarded);
    guarded_free(&planes_guarded);
    guarded_free(&target_guarded);
    guarded_free(&states_guarded);
    return 0;
}
