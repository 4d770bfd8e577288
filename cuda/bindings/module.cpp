// The module: every op is bound in the file of its name (see arrays.h for what they share).
#include "arrays.h"
#include "heterps/grouped_product.h"

NB_MODULE(_ops, m) {
  nb::set_leak_warnings(false);  // what lives until exit is not a leak
  m.doc() = "Native ops (see workers/ops, which registers them with torch)";
  m.attr("cuda_capability") = heterps::kCudaCapability;
#ifdef HETERPS_WITH_CUDA
  m.attr("products_sm90") = heterps::has_products_sm90();
#else
  m.attr("products_sm90") = false;
#endif
  heterps::bind_route(m);
  heterps::bind_gather(m);
  heterps::bind_grouped_ffn(m);
  heterps::bind_routed_ffn(m);
  heterps::bind_linear(m);
  heterps::bind_embedding(m);
  heterps::bind_quantize(m);
  heterps::bind_row_cache(m);
}
