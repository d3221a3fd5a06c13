/* policy.c: the built-in policies.
 *
 * BSP: every active member's gradient, then one step. ASP: every gradient a step of its own, at once.
 */
#include "policy.h"

static enum start_decision always_go(const struct view *view, uint32_t slot) {
    (void)view, (void)slot;
    return START_GO;
}

static enum push_decision stage(const struct view *view, uint32_t slot, float *scale) {
    (void)view, (void)slot;
    *scale = 1.0f;
    return PUSH_STAGE;
}

static enum push_decision admit(const struct view *view, uint32_t slot, float *scale) {
    (void)view, (void)slot;
    *scale = 1.0f;
    return PUSH_ADMIT;
}

static bool everybody_staged(const struct view *view) {
    bool any = false;
    for (uint32_t slot = 0; slot < view->participants; slot++) {
        const struct member *m = view_member(view, slot);
        if (m->staged) any = true;
        else if (m->state == PYPS_ACTIVE && m->claim_count) return false;
    }
    return any;
}

static bool never(const struct view *view) {
    (void)view;
    return false;
}

static const struct policy policies[] = {
    [PYPS_BSP] = {"bsp", true, always_go, stage, everybody_staged},
    [PYPS_ASP] = {"asp", false, always_go, admit, never},
};

const struct policy *policy_find(uint32_t number) {
    return number < sizeof policies / sizeof *policies ? &policies[number] : NULL;
}
