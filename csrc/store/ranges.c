/* ranges.c: gradients of parts of the flat vector.
 *
 * A staging buffer says of which ranges its gradient is. The floats lie at the same places as those of a whole
 * gradient, so that only their pages need memory. A ticket changes the parameters that any of its gradients has. A
 * chunk without such ones takes the ticket by its word alone, which names the same buffer again.
 *
 * The table does not change from admission on, so every participant finds the same runs.
 */
#include <string.h>

#include "store/gradients.h"

#define NEAR_BYTES UINT64_C(8192) /* ranges so close together get their memory by one call */

static pyps_range *table_of(const pyps_store *s, uint32_t slot, uint32_t staging) {
    uint8_t *start = (uint8_t *)(void *)staging_header(s, slot, staging);
    return (pyps_range *)(void *)(start + s->layout.staging_ranges);
}

/* Read once from shared memory, where a hostile owner may change it. */
static uint64_t count_of(const pyps_store *s, uint32_t slot, uint32_t staging) {
    uint64_t count = *(volatile uint64_t *)&staging_header(s, slot, staging)->ranges;
    return count < s->layout.most_ranges ? count : s->layout.most_ranges;
}

int ranges_check(const pyps_store *s, const char *what, const pyps_range *ranges, uint64_t count) {
    uint64_t end = 0, flat = store_elements(s);
    if (!count || count > s->layout.most_ranges)
        return fail(PYPS_EINVAL, "%s: range_count: found %lu; expected 1 to %lu", what, count,
                    s->layout.most_ranges);
    for (uint64_t i = 0; i < count; i++) {
        uint64_t first = ranges[i].first, room = first < flat ? flat - first : 0;
        if (first < end || !ranges[i].count || ranges[i].count > room)
            return fail(PYPS_EINVAL,
                        "%s: ranges[%lu]: found %lu floats from %lu on; expected at least one, from %lu on, "
                        "below %lu",
                        what, i, ranges[i].count, first, end, flat);
        end = first + ranges[i].count;
    }
    return PYPS_OK;
}

bool ranges_next(const pyps_range *ranges, uint64_t count, uint64_t at, uint64_t end, struct run *run) {
    uint64_t low = 0, high = count;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (ranges[middle].first + ranges[middle].count > at) high = middle;
        else low = middle + 1;
    }
    if (low == count) return false;
    pyps_range range = *(const volatile pyps_range *)&ranges[low];
    uint64_t stop = range.first + range.count;
    *run = (struct run){range.first > at ? range.first : at, stop < end ? stop : end};
    return run->first < run->end;
}

/* The next run of one gradient. */
static bool next_of(const pyps_store *s, uint32_t slot, uint32_t staging, uint64_t at, uint64_t end,
                    struct run *run) {
    uint64_t count = count_of(s, slot, staging);
    *run = (struct run){at, end};
    return count ? ranges_next(table_of(s, slot, staging), count, at, end, run) : at < end;
}

bool staging_has(const pyps_store *s, uint32_t slot, uint32_t staging, uint64_t at) {
    struct run run;
    return next_of(s, slot, staging, at, at + 1, &run);
}

bool ticket_is_ranged(const pyps_store *s) {
    if (s->ticket.kind != TICKET_ROUND) return count_of(s, s->ticket.slot, s->ticket.staging);
    for (uint32_t i = 0; i < s->source_count; i++)
        if (count_of(s, s->sources[i].slot, s->sources[i].staging)) return true;
    return false;
}

/* First where the run begins, then where one of the gradients begins or ends after that. */
bool ticket_next_run(const pyps_store *s, uint64_t at, uint64_t end, struct run *run) {
    const struct source alone = {.slot = s->ticket.slot, .staging = s->ticket.staging};
    bool round = s->ticket.kind == TICKET_ROUND;
    const struct source *sources = round ? s->sources : &alone;
    uint32_t count = round ? s->source_count : 1;
    struct run of;
    run->first = run->end = end;
    for (uint32_t i = 0; i < count; i++)
        if (next_of(s, sources[i].slot, sources[i].staging, at, run->first, &of)) run->first = of.first;
    for (uint32_t i = 0; i < count; i++) {
        if (!next_of(s, sources[i].slot, sources[i].staging, run->first, run->end, &of)) continue;
        run->end = of.first > run->first ? of.first : of.end;
    }
    return run->first < run->end;
}

/* Memory for the floats of each range in one part of this slot's staging buffer: its gradient, or its base
 * parameters. */
static int allocate_floats(pyps_store *s, const float *part, const pyps_range *ranges, uint64_t count) {
    uint64_t offset = (uint64_t)((const uint8_t *)(const void *)part - s->base);
    int rc = PYPS_OK;
    for (uint64_t i = 0, last; i < count && !rc; i = last + 1) {
        for (last = i; last + 1 < count; last++)
            if (4 * (ranges[last + 1].first - ranges[last].first - ranges[last].count) > NEAR_BYTES) break;
        uint64_t end = ranges[last].first + ranges[last].count;
        rc = segment_allocate(s, offset + 4 * ranges[i].first, 4 * (end - ranges[i].first));
    }
    return rc;
}

static void put_values(float *part, const float *values, const pyps_range *ranges, uint64_t count) {
    for (uint64_t i = 0; i < count; values += ranges[i++].count)
        memcpy(part + ranges[i].first, values, ranges[i].count * sizeof *values);
}

int ranges_place(pyps_store *s, float *part, const float *values, const pyps_range *ranges, uint64_t count) {
    int rc = allocate_floats(s, part, ranges, count);
    if (!rc && values) put_values(part, values, ranges, count);
    return rc;
}

int ranges_stage(pyps_store *s, uint32_t staging, const pyps_range *ranges, uint64_t count) {
    pyps_range *table = table_of(s, s->slot, staging);
    size_t bytes = count * sizeof *table;
    int rc = bytes ? segment_allocate(s, (uint64_t)((uint8_t *)table - s->base), bytes) : PYPS_OK;
    if (rc) return rc;
    if (bytes) memcpy(table, ranges, bytes);
    staging_header(s, s->slot, staging)->ranges = count;
    return PYPS_OK;
}
