/* A host in ten lines: one tensor, recorded once a step. Run it with ASSAY=all ./host, or ASSAY=all:stderr ./host. */
#include <assay/assay.h>

int main(void) {
  assay_trace* trace;
  assay_open(NULL, &trace, NULL); /* off unless the environment says otherwise; every error may be ignored */
  for (int64_t step = 0; step < 3; ++step) {
    float hidden[2][4] = {{1, 2, 3, 4}, {5, 6, 7, 8.5f + (float)step}};
    assay_event event = assay_event_init();
    event.name = "layers.0.out", event.axes = "T h", event.step = step;
    event.data = hidden, event.dtype = ASSAY_DTYPE_F32, event.ndim = 2, event.shape = (int64_t[]){2, 4};
    if (assay_armed(trace)) assay_record(trace, &event, NULL);
  }
  return assay_close(&trace, NULL);
}
