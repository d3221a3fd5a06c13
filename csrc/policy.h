/* policy.h: a policy is three small pure questions about the view. A new one is a function table in policy.c
 * and an entry in pyps.h; neither runtime nor simulator knows policies by name. */
#ifndef PYPS_POLICY_H
#define PYPS_POLICY_H

#include "view.h"

enum start_decision { START_GO, START_WAIT };
enum push_decision { PUSH_ADMIT, PUSH_STAGE, PUSH_REJECT };

struct policy {
    const char *name;
    bool by_round; /* samples are allotted to all ranks when a round opens; else claimed at each start */
    /* May this member, which has or could claim samples, begin a step now? */
    enum start_decision (*on_start)(const struct view *view, uint32_t slot);
    /* A gradient is ready. On PUSH_ADMIT, *scale multiplies it. */
    enum push_decision (*on_push)(const struct view *view, uint32_t slot, float *scale);
    /* After every event: does the open round close now, with what is staged? */
    bool (*on_event)(const struct view *view);
};

const struct policy *policy_find(uint32_t number); /* NULL if unknown */

#endif
