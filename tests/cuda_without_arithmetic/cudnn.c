/* cuDNN without arithmetic. Functions that are not here succeed and do nothing, or make a handle (cuda_libraries.py). */
#include <stddef.h>
#include <stdlib.h>

size_t cudnnGetVersion(void) { return 91000; }
const char *cudnnGetErrorString(int status) { return status ? "CUDNN_STATUS" : "CUDNN_STATUS_SUCCESS"; }
int cudnnBackendCreateDescriptor(int kind, void **made) { *made = calloc(1, 64); return 0; }
int cudnnGetReductionIndicesSize(void *h, void *r, void *a, void *c, size_t *bytes) { *bytes = 0; return 0; }
int cudnnGetReductionWorkspaceSize(void *h, void *r, void *a, void *c, size_t *bytes) { *bytes = 0; return 0; }
int cudnnGetConvolutionForwardWorkspaceSize(void *h, void *x, void *w, void *c, void *y, int algorithm, size_t *bytes) {
    *bytes = 0;
    return 0;
}
int cudnnDropoutGetStatesSize(void *h, size_t *bytes) { *bytes = 64; return 0; }
int cudnnGetRNNTempSpaceSizes(void *h, void *r, int mode, void *x, size_t *work, size_t *reserve) {
    if (work) *work = 0;
    if (reserve) *reserve = 0;
    return 0;
}
/* A recurrent layer's weights, all of which begin where the space for them does and have no elements. */
int cudnnGetRNNWeightParams(void *h, void *r, int layer, size_t size, void *space, int which, void *weight_kind,
                            void **weight, void *bias_kind, void **bias) {
    *weight = *bias = space;
    return 0;
}
int cudnnGetTensorNdDescriptor(void *kind, int wanted, int *type, int *rank, int *dims, int *strides) {
    *type = 0;
    *rank = wanted;
    for (int k = 0; k < wanted; k++) dims[k] = strides[k] = 0;
    return 0;
}

/* What cuDNN's frontend asks of a graph: one engine configuration with one engine, and numbers that are all 0. */
enum { INT64 = 3, DESCRIPTOR = 15, HEURISTIC_RESULTS = 202, ENGINE_OF_CONFIGURATION = 300 };

int cudnnBackendGetAttribute(void *descriptor, int name, int type, long wanted, long *count, void *elements) {
    int one = type == INT64 || (type == DESCRIPTOR && (name == HEURISTIC_RESULTS || name == ENGINE_OF_CONFIGURATION));
    if (count) *count = one;
    if (elements && wanted > 0 && type == INT64) *(long *)elements = 0;
    return 0;
}
