/* kernels_tail.h: the rest of a step from element `done` on, or of a look from i on, for the scalar kernel. */
#define TAIL(member, done, sound)                                                                            \
    do {                                                                                                     \
        struct step rest = *s;                                                                               \
        rest.gradient += (done), rest.length -= (done);                                                      \
        if (rest.copy) rest.copy += (done);                                                                  \
        for (int t = 0; t < 1 + MAX_STATES; t++)                                                             \
            if (rest.new[t]) rest.new[t] += (done), rest.old[t] += (done);                                   \
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
