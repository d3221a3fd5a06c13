/* failpoint.h: named places where a test can kill or stop the process. Only with -DPYPS_FAILPOINTS. */
#ifndef PYPS_FAILPOINT_H
#define PYPS_FAILPOINT_H

#ifdef PYPS_FAILPOINTS
/* Defined by the test program: called at every failpoint it passes. */
extern void pyps_failpoint(const char *name);
#define FAILPOINT(name) pyps_failpoint(name)
#else
#define FAILPOINT(name) ((void)0)
#endif

#endif
