/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan.c - the decisions of kvrans's encoder
 *
 * Channels of KV differ in their mean and spread, and channels of one kind can share a table. The kinds are computed
 * again for each block: columns are first sorted by spread, then by mean, into equal groups; then each column
 * moves, a few times over, to the group whose table codes it best, and the tables follow (Lloyd's algorithm with code
 * length as its distance). At last the two most similar groups become one, again and again, and the number of groups
 * is kept at which symbols, tables and the columns' numbers together are smallest.
 *
 * All of it is integer arithmetic: the same block becomes the same bytes with every variant of the kernels and on every
 * machine.
 */
#include "codecs/kvrans/plan.h"

#include <string.h>

enum {
    ASSIGN_ROUNDS = 2,        /* more win under 0.05 % */
    CELLS_OF_TABLE = 4096,    /* a block begins with a table for each of these many cells, up to 16 */
    COST_SHIFT = 8,           /* costs are in 1/256 bits */
    COST_MOST = 12 << 8,      /* of a symbol that a group has not seen */
    COST_NEVER = 0x3FFF,      /* of every symbol in a group that does not exist */
    TABLE_BITS_OF_SYMBOL = 5, /* a coded frequency, about */
    BUCKETS = 256,
    LARGE_MOST = 8,      /* slots that a symbol of whole quarters has, at first */
    ALIGNED_SHARE = 128, /* of the bits: what aligned tables may cost */
};

/* ---- Logarithms ---------------------------------------------------------------------------------------------- */

void ss_kvrans_logs_make(struct ss_kvrans_logs *logs) {
    const uint32_t count = 1u << SS_KVRANS_LOG_BITS;

    for (uint32_t index = 0; index < count; index++) {
        uint64_t value = (uint64_t)(count + index) << (30 - SS_KVRANS_LOG_BITS); /* in 1/2^30; squared for each bit */
        uint32_t fraction = 0;
        for (int bit = 0; bit < 16; bit++) {
            value = value * value >> 30;
            fraction <<= 1;
            if (value >= 2ull << 30) {
                value >>= 1;
                fraction |= 1;
            }
        }
        logs->fractions[index] = (uint16_t)fraction;
    }
}

/* log2_of() returns log2('number') in 1/65536, of its first 12 bits; 'number' is not 0 and under 2^32. */
static uint32_t log2_of(const struct ss_kvrans_logs *logs, uint32_t number) {
    uint32_t exponent = 31 - (uint32_t)__builtin_clz(number);
    uint32_t mantissa = number << (31 - exponent) << 1; /* the bits behind the first one */

    return (exponent << 16) + logs->fractions[mantissa >> (32 - SS_KVRANS_LOG_BITS)];
}

/* ---- Alphabet ------------------------------------------------------------------------------------------------ */

/* ring_range() finds the shortest range, modulo 'limit', with all values present; returns its length. */
static uint32_t ring_range(const uint8_t *present, uint32_t limit, uint32_t *first) {
    uint32_t gap_most = 0, gap = 0, gap_end = 0;

    for (uint32_t step = 0; step < 2 * limit; step++) { /* twice around: the gap may go over the end */
        gap = present[step % limit] ? 0 : gap + 1;
        if (gap > gap_most && gap < limit) {
            gap_most = gap;
            gap_end = step % limit;
        }
    }
    *first = (gap_end + 1) % limit;
    return limit - gap_most;
}

static void alphabet_range(struct ss_kvrans_alphabet *alphabet, uint32_t first, uint32_t count) {
    const uint32_t limit = 256u >> alphabet->shift;

    alphabet->listed = 0;
    alphabet->count = count < 2 ? 2 : count; /* no frequency is 256, so one symbol is not enough */
    for (uint32_t index = 0; index < alphabet->count; index++) {
        alphabet->value[index] = (uint8_t)((first + index) % limit);
        alphabet->index[alphabet->value[index]] = (uint8_t)index;
    }
}

/* alphabet_try() makes the alphabet of the values present, unless they are too many for it. */
static int alphabet_try(struct ss_kvrans_alphabet *alphabet, const uint8_t *present) {
    const uint32_t limit = 256u >> alphabet->shift;
    uint32_t first = 0, count = 0, range = ring_range(present, limit, &first);

    if (range <= SS_KVRANS_INDEX_MAX) {
        alphabet_range(alphabet, first, range);
        return 1;
    }
    for (uint32_t value = 0; value < limit; value++) {
        count += present[value];
    }
    if (count > SS_KVRANS_INDEX_MAX) {
        return 0;
    }
    alphabet->listed = 1;
    alphabet->count = 0;
    for (uint32_t value = 0; value < limit; value++) {
        if (present[value]) {
            alphabet->index[value] = (uint8_t)alphabet->count;
            alphabet->value[alphabet->count++] = (uint8_t)value;
        }
    }
    return 1;
}

void ss_kvrans_alphabet_choose(const struct ss_kvrans_kernels *kernels, const struct ss_kvrans_extremes *extremes,
                               const uint8_t *source, size_t size, struct ss_kvrans_alphabet *alphabet) {
    uint32_t range = (uint32_t)(extremes->most - extremes->least) + 1;
    uint32_t signed_range = (uint32_t)(extremes->signed_most - extremes->signed_least) + 1;
    uint8_t present[256] = {0};

    memset(alphabet, 0, sizeof *alphabet);
    if (range <= SS_KVRANS_INDEX_MAX || signed_range <= SS_KVRANS_INDEX_MAX) { /* which a look at each byte would say */
        int is_signed = signed_range < range;
        alphabet_range(alphabet, is_signed ? (uint8_t)extremes->signed_least : extremes->least,
                       is_signed ? signed_range : range);
        return;
    }
    kernels->present(source, size, present);
    while (!alphabet_try(alphabet, present)) {
        alphabet->shift++;
        for (uint32_t value = 0; value < 256; value++) {
            present[value] = value < 256u >> alphabet->shift ? present[2 * value] | present[2 * value + 1] : 0;
        }
    }
}

/* ---- Groups of columns --------------------------------------------------------------------------------------- */

struct groups {
    uint32_t count;
    uint32_t totals[SS_KVRANS_TABLES_MAX][SS_KVRANS_INDEX_MAX];
    uint32_t sums[SS_KVRANS_TABLES_MAX];
};

/*
 * part_of() copies the counts of some columns, and returns a plan of these alone: enough of them to find groups by. One
 * of each 'apart' is taken, any of them, or a regular pattern in the channels might hide from us.
 */
static struct ss_kvrans_plan part_of(const struct ss_kvrans_plan *plan) {
    const uint32_t apart = plan->columns / SS_KVRANS_PART_ENOUGH;
    struct ss_kvrans_plan part = *plan;

    if (apart < 2) {
        return part;
    }
    part.counts = plan->counts_of_part;
    part.columns = plan->columns / apart;
    for (uint32_t index = 0; index < part.columns; index++) {
        uint32_t column = index * apart + (index * 0x9E3779B1u >> 16) % apart;
        memcpy(part.counts + (size_t)index * SS_KVRANS_INDEX_MAX, plan->counts + (size_t)column * SS_KVRANS_INDEX_MAX,
               SS_KVRANS_INDEX_MAX * sizeof *part.counts);
    }
    return part;
}

/* groups_total() adds up the counts of each group's columns, and numbers the groups that have columns from 0 on. */
static void groups_total(const struct ss_kvrans_kernels *kernels, const struct ss_kvrans_plan *plan,
                         uint32_t index_count, uint8_t *column_table, struct groups *groups) {
    uint32_t columns[SS_KVRANS_TABLES_MAX] = {0}, count = 0;
    uint8_t numbers[SS_KVRANS_TABLES_MAX] = {0};

    for (uint32_t column = 0; column < plan->columns; column++) {
        columns[column_table[column]]++;
    }
    for (uint32_t group = 0; group < groups->count; group++) {
        if (columns[group] != 0) {
            groups->sums[count] = columns[group] * plan->rows;
            numbers[group] = (uint8_t)count++;
        }
    }
    if (count < groups->count) {
        for (uint32_t column = 0; column < plan->columns; column++) {
            column_table[column] = numbers[column_table[column]];
        }
        groups->count = count;
    }
    memset(groups->totals, 0, sizeof(groups->totals));
    kernels->total(plan, column_table, index_count, groups->totals);
}

/* quantile_groups() maps each bucket of a histogram to one of 'count' groups of about equal size. */
static void quantile_groups(const uint32_t *histogram, uint32_t count, uint8_t *group_of) {
    uint32_t total = 0, before = 0;

    for (uint32_t bucket = 0; bucket < BUCKETS; bucket++) {
        total += histogram[bucket];
    }
    for (uint32_t bucket = 0; bucket < BUCKETS; bucket++) {
        uint64_t middle = before + histogram[bucket] / 2;
        uint32_t group;
        if (histogram[bucket] == 0) { /* an empty bucket needs no group */
            continue;
        }
        group = (uint32_t)(middle * count / total);
        group_of[bucket] = (uint8_t)(group < count ? group : count - 1);
        before += histogram[bucket];
    }
}

/* groups_start() sorts the columns into 'spreads' groups by their spread, and each of these into 'means' by mean. */
static void groups_start(const struct ss_kvrans_logs *logs, const struct ss_kvrans_plan *plan, uint32_t index_count,
                         uint32_t spreads, uint32_t means, uint8_t *column_table) {
    uint8_t *column_mean = plan->cells_scratch;
    uint32_t by_spread[BUCKETS] = {0}, by_mean[SS_KVRANS_TABLES_MAX][BUCKETS];
    uint8_t spread_group[BUCKETS], mean_group[SS_KVRANS_TABLES_MAX][BUCKETS];

    memset(by_mean, 0, spreads * sizeof(by_mean[0]));
    for (uint32_t column = 0; column < plan->columns; column++) {
        const uint16_t *counts = plan->counts + (size_t)column * SS_KVRANS_INDEX_MAX;
        int32_t sum = 0, square = 0;
        uint32_t spread;
        for (uint32_t index = 0; index < (index_count + 7) / 8 * 8; index++) {
            sum += (int16_t)index * (int16_t)counts[index];
            square += (int16_t)(index * index) * (int16_t)counts[index];
        }
        spread = log2_of(logs, (uint32_t)square - (uint32_t)((uint64_t)sum * (uint64_t)sum / plan->rows) + 1) >> 13;
        column_table[column] = (uint8_t)(spread < BUCKETS ? spread : BUCKETS - 1);
        column_mean[column] = (uint8_t)((uint32_t)sum * 4 / plan->rows);
        by_spread[column_table[column]]++;
    }
    quantile_groups(by_spread, spreads, spread_group);
    for (uint32_t column = 0; column < plan->columns; column++) {
        column_table[column] = spread_group[column_table[column]];
        by_mean[column_table[column]][column_mean[column]]++;
    }
    for (uint32_t group = 0; group < spreads; group++) {
        quantile_groups(by_mean[group], means, mean_group[group]);
    }
    for (uint32_t column = 0; column < plan->columns; column++) {
        column_table[column] =
            (uint8_t)(column_table[column] * means + mean_group[column_table[column]][column_mean[column]]);
    }
}

/* groups_move() moves each column to the group whose table codes it best. */
static void groups_move(const struct ss_kvrans_kernels *kernels, const struct ss_kvrans_logs *logs,
                        const struct ss_kvrans_plan *plan, uint32_t index_count, struct groups *groups,
                        uint8_t *column_table) {
    struct ss_kvrans_costs costs;

    for (uint32_t group = 0; group < SS_KVRANS_TABLES_MAX; group++) {
        uint32_t all = group < groups->count ? log2_of(logs, groups->sums[group] + index_count) : 0;
        for (uint32_t index = 0; index < (index_count + 1) / 2 * 2; index++) {
            uint32_t cost = COST_NEVER;
            if (group < groups->count) {
                cost = (all - log2_of(logs, groups->totals[group][index] + 1)) >> COST_SHIFT;
                cost = cost < COST_MOST ? cost : COST_MOST;
            }
            costs.cost[index / 2][group][index % 2] = (int16_t)cost;
        }
    }
    kernels->assign(plan, &costs, index_count, column_table);
    groups_total(kernels, plan, index_count, column_table, groups);
}

/* entropy_of() returns the bits, in 1/65536, of coding 'totals' with a table of their own. */
static uint64_t entropy_of(const struct ss_kvrans_logs *logs, const uint32_t *totals, const uint32_t *more,
                           uint32_t index_count) {
    uint64_t sum = 0, bits = 0;

    for (uint32_t index = 0; index < index_count; index++) {
        uint32_t total = totals[index] + (more != NULL ? more[index] : 0);
        sum += total;
        if (total != 0) {
            bits += (uint64_t)total * log2_of(logs, total);
        }
    }
    return sum != 0 ? sum * log2_of(logs, (uint32_t)sum) - bits : 0;
}

/* Cost of joining two groups, in 1/65536 bits, and cost of each alone. */
struct joins {
    uint64_t alone[SS_KVRANS_TABLES_MAX];
    uint64_t joined[SS_KVRANS_TABLES_MAX][SS_KVRANS_TABLES_MAX]; /* for the lower number first */
};

/* joins_best() returns the loss of joining '*low' and '*high', the two groups that lose least. */
static uint64_t joins_best(const struct joins *joins, uint32_t count, uint32_t *low, uint32_t *high) {
    uint64_t least = UINT64_MAX;

    for (uint32_t first = 0; first < count; first++) {
        for (uint32_t second = first + 1; second < count; second++) {
            uint64_t apart = joins->alone[first] + joins->alone[second], joined = joins->joined[first][second];
            uint64_t loss = joined > apart ? joined - apart : 0;
            if (loss < least) {
                least = loss;
                *low = first;
                *high = second;
            }
        }
    }
    return least;
}

/* groups_join() makes one group of two; the last one takes the number that becomes free. */
static void groups_join(const struct ss_kvrans_logs *logs, struct groups *groups, struct joins *joins,
                        uint32_t index_count, uint32_t low, uint32_t high) {
    const uint32_t last = --groups->count;

    for (uint32_t index = 0; index < index_count; index++) {
        groups->totals[low][index] += groups->totals[high][index];
    }
    groups->sums[low] += groups->sums[high];
    joins->alone[low] = joins->joined[low][high];
    if (high != last) {
        memcpy(groups->totals[high], groups->totals[last], sizeof(groups->totals[high]));
        groups->sums[high] = groups->sums[last];
        joins->alone[high] = joins->alone[last];
        for (uint32_t other = 0; other < last; other++) {
            if (other != high) {
                joins->joined[other < high ? other : high][other < high ? high : other] = joins->joined[other][last];
            }
        }
    }
    for (uint32_t other = 0; other < last; other++) {
        if (other != low) {
            joins->joined[other < low ? other : low][other < low ? low : other] =
                entropy_of(logs, groups->totals[low], groups->totals[other], index_count);
        }
    }
}

/* groups_joined() makes each group what 'number' says it becomes a part of. */
static void groups_joined(struct groups *groups, const struct groups *before, const uint8_t *number,
                          uint32_t index_count) {
    *groups = (struct groups){.count = 0};
    for (uint32_t group = 0; group < before->count; group++) {
        const uint32_t into = number[group];
        groups->count = into + 1 > groups->count ? into + 1 : groups->count;
        groups->sums[into] += before->sums[group];
        for (uint32_t index = 0; index < index_count; index++) {
            groups->totals[into][index] += before->totals[group][index];
        }
    }
}

/*
 * groups_reduce() joins groups as long as that makes the block smaller. Their columns keep the numbers they had, since
 * all move right after this.
 */
static void groups_reduce(const struct ss_kvrans_logs *logs, uint32_t columns, uint32_t index_count, uint32_t share,
                          struct groups *groups) {
    const uint64_t table_cost = (uint64_t)TABLE_BITS_OF_SYMBOL * index_count * SS_KVRANS_LOG_ONE;
    const uint64_t number_cost = (uint64_t)columns * SS_KVRANS_LOG_ONE;
    const struct groups before = *groups;
    uint8_t numbers[SS_KVRANS_TABLES_MAX], best_numbers[SS_KVRANS_TABLES_MAX];
    uint64_t lost = 0, least;
    struct joins joins;

    for (uint32_t first = 0; first < groups->count; first++) {
        numbers[first] = best_numbers[first] = (uint8_t)first;
        joins.alone[first] = entropy_of(logs, groups->totals[first], NULL, index_count);
        for (uint32_t second = first + 1; second < groups->count; second++) {
            joins.joined[first][second] = entropy_of(logs, groups->totals[first], groups->totals[second], index_count);
        }
    }
    least = table_cost * groups->count + number_cost * ss_kvrans_bits(groups->count);
    while (groups->count > 1 && lost + table_cost < least) { /* what is lost stays lost, and one table will be left */
        uint32_t low = 0, high = 0;
        uint64_t cost;
        lost += share * joins_best(&joins, groups->count, &low, &high);
        for (uint32_t group = 0; group < before.count; group++) {
            if (numbers[group] == high) {
                numbers[group] = (uint8_t)low;
            } else if (numbers[group] == groups->count - 1) {
                numbers[group] = (uint8_t)high;
            }
        }
        groups_join(logs, groups, &joins, index_count, low, high);
        cost = lost + table_cost * groups->count + number_cost * ss_kvrans_bits(groups->count);
        if (cost < least) {
            least = cost;
            memcpy(best_numbers, numbers, sizeof numbers);
        }
    }
    groups_joined(groups, &before, best_numbers, index_count);
}

/* ---- Tables -------------------------------------------------------------------------------------------------- */

/* worth_of() returns what one slot more, or less, is worth to a symbol; 0 where it cannot have one, or lose one. */
static uint64_t worth_of(uint32_t total, uint32_t frequency, int up) {
    uint32_t around = up ? 2 * frequency + 1 : 2 * frequency - 1; /* twice the middle of the step */

    if (total == 0 || (up ? frequency >= SS_KVRANS_SLOTS - 1 : frequency <= 1)) {
        return 0;
    }
    return (((uint64_t)total << 20) / around) + 1;
}

/*
 * frequencies_adjust() adds slots to the symbols with the largest gain, or removes them from the symbols with the
 * smallest loss, until 'slots' is SS_KVRANS_SLOTS or no symbol is left. Returns the slots in use.
 */
static uint32_t frequencies_adjust(const uint32_t *totals, uint32_t index_count, uint32_t slots, uint32_t *frequency) {
    const int up = slots < SS_KVRANS_SLOTS;
    uint64_t worth[SS_KVRANS_INDEX_MAX];

    if (slots == SS_KVRANS_SLOTS) {
        return slots;
    }
    for (uint32_t index = 0; index < index_count; index++) {
        worth[index] = worth_of(totals[index], frequency[index], up);
    }
    while (slots != SS_KVRANS_SLOTS) {
        uint64_t best = 0;
        uint32_t chosen = 0;
        for (uint32_t index = 0; index < index_count; index++) {
            if (up ? worth[index] > best : worth[index] - 1 < best - 1) { /* 0 less one is the most of all */
                best = worth[index];
                chosen = index;
            }
        }
        if (best == 0) {
            break;
        }
        frequency[chosen] += up ? 1 : (uint32_t)-1;
        slots += up ? 1 : (uint32_t)-1;
        worth[chosen] = worth_of(totals[chosen], frequency[chosen], up);
    }
    return slots;
}

/* frequencies_make() scales 'totals' to SS_KVRANS_SLOTS, so that whatever occurs has at least one slot. */
static void frequencies_make(const uint32_t *totals, uint32_t sum, uint32_t index_count, uint8_t *frequencies) {
    uint32_t frequency[SS_KVRANS_INDEX_MAX] = {0}, slots = 0, left = SS_KVRANS_SLOTS, often = sum;

    for (uint32_t index = 0; index < index_count; index++) {
        if (totals[index] != 0 &&
            totals[index] < sum / SS_KVRANS_SLOTS) { /* these get one slot; who shares the rest? */
            often -= totals[index];
            left--;
        }
    }
    for (uint32_t index = 0; index < index_count; index++) {
        if (totals[index] == 0) {
            continue;
        }
        frequency[index] = (uint32_t)(((uint64_t)totals[index] * left + often / 2) / often);
        frequency[index] = frequency[index] < 1 ? 1 : frequency[index];
        frequency[index] = frequency[index] > SS_KVRANS_SLOTS - 1 ? SS_KVRANS_SLOTS - 1 : frequency[index];
        slots += frequency[index];
    }
    slots = frequencies_adjust(totals, index_count, slots, frequency);
    if (slots < SS_KVRANS_SLOTS) { /* a single symbol: one slot goes to another, which does not occur */
        frequency[frequency[0] == 0 ? 0 : 1] = SS_KVRANS_SLOTS - slots;
    }
    for (uint32_t index = 0; index < SS_KVRANS_INDEX_MAX; index++) {
        frequencies[index] = (uint8_t)frequency[index];
    }
}

/* coded_bits() returns what coding 'totals' with a table takes. */
static uint64_t coded_bits(const struct ss_kvrans_logs *logs, const uint32_t *totals, const uint8_t *frequency,
                           uint32_t index_count) {
    uint64_t bits = 0;

    for (uint32_t index = 0; index < index_count; index++) {
        if (totals[index] != 0) {
            bits += (uint64_t)totals[index] * (8 * SS_KVRANS_LOG_ONE - log2_of(logs, frequency[index]));
        }
    }
    return bits / SS_KVRANS_LOG_ONE;
}

int ss_kvrans_shift_more(const struct ss_kvrans_logs *logs, uint64_t cells, struct ss_kvrans_alphabet *alphabet,
                         struct ss_kvrans_tables *tables) {
    struct ss_kvrans_alphabet halved = {.shift = alphabet->shift + 1};
    struct ss_kvrans_tables fewer = {.count = tables->count};
    uint32_t first = alphabet->value[0] / 2, limit = 256u >> halved.shift;

    if (alphabet->count <= SS_KVRANS_INDEX_MAX / 2 || alphabet->listed || halved.shift > SS_KVRANS_SHIFT_MAX) {
        return 0;
    }
    alphabet_range(&halved, first, (alphabet->value[0] % 2 + alphabet->count + 1) / 2);
    if (halved.count > limit) {
        return 0;
    }
    for (uint32_t table = 0; table < tables->count; table++) {
        fewer.sums[table] = tables->sums[table];
        for (uint32_t index = 0; index < alphabet->count; index++) {
            fewer.totals[table][halved.index[alphabet->value[index] / 2]] += tables->totals[table][index];
        }
        frequencies_make(fewer.totals[table], fewer.sums[table], halved.count, fewer.frequency[table]);
        fewer.coded_bits += coded_bits(logs, fewer.totals[table], fewer.frequency[table], halved.count);
    }
    if (fewer.coded_bits + cells >= tables->coded_bits) {
        return 0;
    }
    *alphabet = halved;
    *tables = fewer;
    return 1;
}

void ss_kvrans_tables_choose(const struct ss_kvrans_kernels *kernels, const struct ss_kvrans_logs *logs,
                             const struct ss_kvrans_plan *plan, uint32_t index_count, uint8_t *column_table,
                             struct ss_kvrans_tables *tables) {
    const uint64_t cells = (uint64_t)plan->rows * plan->columns;
    const uint32_t means = cells >= 8 * CELLS_OF_TABLE ? 4 : cells >= 2 * CELLS_OF_TABLE ? 2 : 1;
    const uint32_t spreads = cells >= 16 * CELLS_OF_TABLE ? 4 : cells >= 4 * CELLS_OF_TABLE ? 2 : 1;
    struct groups groups = {.count = spreads * means};
    const struct ss_kvrans_plan some = part_of(plan);

    groups_start(logs, &some, index_count, spreads, means, column_table);
    groups_total(kernels, &some, index_count, column_table, &groups);
    for (int round = 0; round < ASSIGN_ROUNDS && groups.count > 1; round++) {
        groups_move(kernels, logs, &some, index_count, &groups, column_table);
    }
    groups_reduce(logs, plan->columns, index_count, plan->columns / some.columns, &groups);
    groups_move(kernels, logs, plan, index_count, &groups, column_table);
    tables->count = groups.count;
    tables->coded_bits = 0;
    memcpy(tables->totals, groups.totals, sizeof(groups.totals));
    memcpy(tables->sums, groups.sums, sizeof(groups.sums));
    for (uint32_t group = 0; group < groups.count; group++) {
        frequencies_make(groups.totals[group], groups.sums[group], index_count, tables->frequency[group]);
        tables->coded_bits += coded_bits(logs, groups.totals[group], tables->frequency[group], index_count);
    }
}

/* ---- Few entries --------------------------------------------------------------------------------------------- */

/* run_align() makes the sum of frequencies from 'first' to before 'end', none of them over 255, a multiple of 4. */
static uint32_t run_align(const uint32_t *totals, uint32_t first, uint32_t end, uint32_t sum, uint32_t *frequency) {
    uint32_t symbols = 0, wanted = (sum + 2) / 4 * 4;

    while (frequency[first] == 0) {
        first++;
    }
    for (uint32_t index = first; index < end; index++) {
        symbols += frequency[index] != 0;
    }
    wanted = wanted < symbols ? wanted + 4 : wanted;
    while (sum != wanted) {
        const int up = sum < wanted;
        uint64_t best = 0;
        uint32_t chosen = first;
        for (uint32_t index = first; index < end; index++) {
            const uint64_t worth = worth_of(totals[index], frequency[index], up);
            if (up ? worth > best : worth - 1 < best - 1) { /* 0 less one is the most of all */
                best = worth;
                chosen = index;
            }
        }
        frequency[chosen] += up ? 1 : (uint32_t)-1;
        sum += up ? 1 : (uint32_t)-1;
    }
    return sum;
}

/* fours_adjust() adds or removes four slots, again and again, until there are SS_KVRANS_SLOTS. Returns whether it can.
 */
static int fours_adjust(const uint32_t *totals, uint32_t index_count, const uint8_t *before, uint32_t large,
                        uint32_t slots, uint32_t *frequency) {
    while (slots != SS_KVRANS_SLOTS) {
        const int up = slots < SS_KVRANS_SLOTS;
        uint64_t best = 0;
        uint32_t chosen = 0;
        for (uint32_t index = 0; index < index_count; index++) {
            const uint32_t its = frequency[index], around = up ? its + 2 : its - 2;
            uint64_t worth;
            if (before[index] < large || (up ? its >= SS_KVRANS_SLOTS - 4 : its <= 4)) {
                continue;
            }
            worth = ((uint64_t)totals[index] << 20) / around + 1;
            if (best == 0 || (up ? worth > best : worth < best)) {
                best = worth;
                chosen = index;
            }
        }
        if (best == 0) {
            return 0;
        }
        frequency[chosen] += up ? 4 : (uint32_t)-4;
        slots += up ? 4 : (uint32_t)-4;
    }
    return 1;
}

/*
 * frequencies_align() makes frequencies of at least 'large' slots, and sums of smaller ones between them, multiples of
 * 4. Returns 0 where it cannot, or where more than SS_KVRANS_INDEX_MAX entries are left: a large symbol has one, and a
 * small one has one for each of its slots.
 */
static int frequencies_align(const uint32_t *totals, uint32_t index_count, uint32_t large, const uint8_t *before,
                             uint8_t *after) {
    uint32_t frequency[SS_KVRANS_INDEX_MAX] = {0}, slots = 0, entries = 0, run = 0, run_sum = 0;

    for (uint32_t index = 0; index <= index_count; index++) {
        const uint32_t its = index < index_count ? before[index] : SS_KVRANS_SLOTS;
        if (its < large) {
            frequency[index] = its;
            run_sum += its;
            continue;
        }
        run_sum = run_sum != 0 ? run_align(totals, run, index, run_sum, frequency) : 0;
        slots += run_sum;
        entries += run_sum;
        run_sum = 0;
        run = index + 1;
        if (index < index_count) {
            frequency[index] = its < 6 ? 4 : its < SS_KVRANS_SLOTS - 4 ? (its + 2) / 4 * 4 : SS_KVRANS_SLOTS - 4;
            slots += frequency[index];
            entries++;
        }
    }
    if (entries > SS_KVRANS_INDEX_MAX || !fours_adjust(totals, index_count, before, large, slots, frequency)) {
        return 0;
    }
    for (uint32_t index = 0; index < SS_KVRANS_INDEX_MAX; index++) {
        after[index] = (uint8_t)frequency[index];
    }
    return 1;
}

void ss_kvrans_tables_align(const struct ss_kvrans_logs *logs, uint32_t index_count, struct ss_kvrans_tables *tables) {
    uint8_t aligned[SS_KVRANS_TABLES_MAX][SS_KVRANS_INDEX_MAX];
    uint64_t bits = 0;

    for (uint32_t table = 0; table < tables->count; table++) {
        const uint32_t *totals = tables->totals[table];
        uint32_t large = LARGE_MOST;
        while (!frequencies_align(totals, index_count, large, tables->frequency[table], aligned[table])) {
            if (--large == 0) {
                return;
            }
        }
        bits += coded_bits(logs, totals, aligned[table], index_count);
    }
    if (bits <= tables->coded_bits + tables->coded_bits / ALIGNED_SHARE) {
        memcpy(tables->frequency, aligned, sizeof aligned);
        tables->coded_bits = bits;
    }
}
