/* policy_custom.c: a policy that somebody wrote outside, asked through callbacks. It sees what is asked about
 * and words of its own in the view; it holds nothing, and is asked again when its commit is lost.
 */
#include <string.h>

#include "error.h"
#include "policy/policy.h"

static pyps_custom callbacks;

int pyps_set_custom(const pyps_custom *custom) {
    if (!custom || !custom->start || !custom->push)
        return fail(PYPS_EINVAL, "custom: found NULL; expected start and push");
    callbacks = *custom;
    return PYPS_OK;
}

bool custom_known(void) { return callbacks.start != NULL; }

static pyps_sight sight(const struct view *v, uint32_t slot, uint64_t now) {
    const struct member *m = view_member(v, slot);
    return (pyps_sight){.custom = v->rules.custom,
                        .now = now,
                        .version = v->version,
                        .staleness = v->version - m->pulled,
                        .clock = m->clock,
                        .slowest = v->floor,
                        .fastest = v->ceiling,
                        .rank = (uint32_t)m->rank,
                        .workers = v->active,
                        .samples = m->claim_count,
                        .batch = view_rank(v, (uint32_t)m->rank)->total.batch};
}

static int failed(struct outcome *out) {
    return out->code = fail(PYPS_EPOLICY, "the policy failed to decide");
}

static enum start_decision on_start(struct view *v, const struct event *e, struct outcome *out) {
    pyps_sight seen = sight(v, e->slot, e->now);
    uint64_t words[PYPS_WORDS];
    memcpy(words, v->scratch, sizeof words);
    if (e->kind == EVENT_START_AHEAD) seen.slowest += clock_alone(v, view_member(v, e->slot)), seen.clock++;
    int answer = callbacks.start(&seen, words);
    out->until = v->sequence + 1; /* whatever happens next may change its mind */
    if (answer < 0) failed(out);
    if (answer <= 0) return START_WAIT;
    memcpy(v->scratch, words, sizeof words);
    return START_GO;
}

static enum push_decision on_push(struct view *v, const struct event *e, struct outcome *out) {
    pyps_sight seen = sight(v, e->slot, e->now);
    seen.samples = e->samples, seen.staleness = out->staleness;
    int answer = callbacks.push(&seen, v->scratch, &out->scale);
    if (answer < 0) failed(out);
    return answer > 0 ? PUSH_ADMIT : PUSH_REJECT;
}

/* Whom the policy lets begin, and who does not; not whom it makes wait itself. */
static bool holds_up(const struct view *v, uint32_t slot, uint64_t now) {
    if (view_member(v, slot)->claim_count || !samples_left(v)) return view_member(v, slot)->claim_count;
    pyps_sight seen = sight(v, slot, now);
    uint64_t words[PYPS_WORDS];
    memcpy(words, v->scratch, sizeof words);
    return callbacks.start(&seen, words) > 0;
}

static uint64_t progress(const struct view *v) { return v->sequence; }

const struct policy policy_custom = {
    .name = "custom", .on_start = on_start, .on_push = on_push, .holds_up = holds_up, .progress = progress};
