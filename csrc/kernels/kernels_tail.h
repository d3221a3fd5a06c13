/* kernels_tail.h: the rest of a step or of a look, from element i on, for the scalar kernel. */
#define TAIL(member, sound)                                                                                  \
    do {                                                                                                     \
        struct step rest = *s;                                                                               \
        rest.gradient += i, rest.length -= i;                                                                \
        if (rest.copy) rest.copy += i;                                                                       \
        for (int t = 0; t < 1 + MAX_STATES; t++)                                                             \
            if (rest.new[t]) rest.new[t] += i, rest.old[t] += i;                                             \
        return (!rest.length || kernels_scalar.member(&rest, k)) && (sound);                                 \
    } while (0)

#define LOOK_TAIL(member)                                                                                    \
    do {                                                                                                     \
        struct look rest = *l;                                                                               \
        rest.to += i, rest.length -= i, rest.streams = false;                                                \
        if (rest.gradient) rest.gradient += i;                                                               \
        for (int t = 0; t < 1 + MAX_STATES; t++)                                                             \
            if (rest.from[t]) rest.from[t] += i;                                                             \
        if (rest.length) kernels_scalar.member(&rest);                                                       \
    } while (0)
