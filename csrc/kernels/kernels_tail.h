/* kernels_tail.h: the rest of a step, from element i on, for the scalar kernel. */
#define TAIL(member)                                                                                         \
    do {                                                                                                     \
        struct step rest = *s;                                                                               \
        rest.gradient += i, rest.length -= i;                                                                \
        if (rest.copy) rest.copy += i;                                                                       \
        for (int t = 0; t < 1 + MAX_STATES; t++)                                                             \
            if (rest.new[t]) rest.new[t] += i, rest.old[t] += i;                                             \
        if (rest.length) kernels_scalar.member(&rest, k);                                                    \
    } while (0)
