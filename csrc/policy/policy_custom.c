/* policy_custom.c: a policy that the user wrote, asked through callbacks. It sees a context and its shared
 * state in the view. It must keep nothing else, because it is asked again when a commit is lost.
 */
#include <string.h>

#include "policy/policy.h"

static pyps_custom callbacks;

int pyps_set_custom(const pyps_custom *custom) {
    pyps_custom copy;
    int rc = read_struct("custom", custom, push, &copy);
    if (!rc && (!copy.start || !copy.push))
        rc = fail(PYPS_EINVAL, "custom: found NULL; expected start and push");
    if (!rc) callbacks = copy;
    return rc;
}

static int check_params(const pyps_policy_params *params) {
    (void)params;
    return callbacks.start
               ? PYPS_OK
               : fail(PYPS_EPOLICY, "policy: custom: this process has not called pyps_set_custom");
}

static pyps_policy_context context_of(const struct view *v, uint32_t slot, uint64_t now) {
    const struct member *m = view_member(v, slot);
    return (pyps_policy_context){.custom = v->policy_params.custom,
                                 .now = now,
                                 .version = v->version,
                                 .staleness = v->version - m->pulled_version,
                                 .clock = m->clock,
                                 .slowest = v->min_clock,
                                 .fastest = v->max_clock,
                                 .rank = (uint32_t)m->rank,
                                 .workers = v->active,
                                 .samples = m->claim_count,
                                 .batch = view_rank(v, (uint32_t)m->rank)->total.batch};
}

static int failed(struct outcome *out) {
    return out->code = fail(PYPS_EPOLICY, "the policy failed to decide");
}

static enum start_decision on_start(struct view *v, const struct event *e, struct outcome *out) {
    pyps_policy_context context = context_of(v, e->slot, e->now);
    uint64_t shared_state[PYPS_STATE_WORDS];
    memcpy(shared_state, v->shared_state, sizeof shared_state);
    const struct member *m = view_member(v, e->slot);
    if (e->kind == EVENT_START_AHEAD) {
        context.clock += 1 + m->ahead;
        context.slowest = view_clock_min_after(v, m, context.clock);
    }
    int answer = callbacks.start(&context, shared_state);
    out->until = v->sequence + 1; /* any event may change its answer */
    if (answer < 0) failed(out);
    if (answer <= 0) return START_WAIT;
    memcpy(v->shared_state, shared_state, sizeof shared_state);
    return START_GO;
}

static bool on_push(struct view *v, const struct event *e, struct outcome *out) {
    pyps_policy_context context = context_of(v, e->slot, e->now);
    context.samples = e->samples, context.staleness = out->staleness;
    int answer = callbacks.push(&context, v->shared_state, &out->scale);
    if (answer < 0) failed(out);
    return answer > 0;
}

/* A worker that holds samples, or that the policy lets start but that has not started. */
static bool holds_up(const struct view *v, uint32_t slot, uint64_t now) {
    if (view_member(v, slot)->claim_count || !view_samples_left(v)) return view_member(v, slot)->claim_count;
    pyps_policy_context context = context_of(v, slot, now);
    uint64_t shared_state[PYPS_STATE_WORDS];
    memcpy(shared_state, v->shared_state, sizeof shared_state);
    return callbacks.start(&context, shared_state) > 0;
}

static uint64_t progress(const struct view *v) { return v->sequence; }

const struct policy policy_custom = {.name = "custom",
                                     .check_params = check_params,
                                     .on_start = on_start,
                                     .on_push = on_push,
                                     .holds_up = holds_up,
                                     .progress = progress};
