// What the policy sees of a problem and of an episode: the name and the place of each number.
//
// A policy's weights are trained for these places, so another order makes it another policy.
#pragma once

namespace heterps::scheduler {

// Of a layer on a type, before anything is placed, without scale. Units are those that the layer
// alone would need at the pace, prices those of its fractions of units.
#define HETERPS_LAYER_FEATURES(FEATURE)                     \
  FEATURE(usable)                                           \
  FEATURE(compute_units)                                    \
  FEATURE(sync_units)                                       \
  FEATURE(transfer_units)                                   \
  FEATURE(serial_share) /* of the pace's time */            \
  FEATURE(transfer_serial_share)                            \
  FEATURE(price_over_cheapest) /* type of this layer */     \
  FEATURE(price)                                            \
  FEATURE(unit_price_over_mean)                             \
  FEATURE(unit_price)                                       \
  FEATURE(units_left)  /* of the type */                    \
  FEATURE(units_share) /* of those left */                  \
  FEATURE(memory_share)                                     \
  FEATURE(parameter_server) /* the type hosts it */         \
  FEATURE(position)         /* in the chain, 0 to 1 */      \
  FEATURE(layers_left)                                      \
  FEATURE(price_share_before) /* of the layers before it */ \
  FEATURE(transfer_price)                                   \
  FEATURE(price_root) /* of its share of the reference */   \
  FEATURE(least_price_root)                                 \
  FEATURE(reach) /* layers its units take in too */         \
  FEATURE(reach_share)

// Of an episode, for the next layer on a type; of a masked type only that it is.
#define HETERPS_STATE_FEATURES(FEATURE)                    \
  FEATURE(allowed)                                         \
  FEATURE(current_stage) /* is on this type */             \
  FEATURE(added_price)                                     \
  FEATURE(spare_units) /* unused part of the last unit */  \
  FEATURE(spare_price)                                     \
  FEATURE(units)                                           \
  FEATURE(serial_share) /* of the pace's time */           \
  FEATURE(memory_share)                                    \
  FEATURE(units_share) /* taken, of those left */          \
  FEATURE(type_used)                                       \
  FEATURE(ending_price)  /* of a stage ending here */      \
  FEATURE(leaving_price) /* of ending the current stage */ \
  FEATURE(spent)                                           \
  FEATURE(stage_length)                                    \
  FEATURE(reach) /* layers that come for free */           \
  FEATURE(reach_share)

#define HETERPS_PLACE(name) name,
namespace layer_feature {
enum Place : int { HETERPS_LAYER_FEATURES(HETERPS_PLACE) count };
}
namespace state_feature {
enum Place : int { HETERPS_STATE_FEATURES(HETERPS_PLACE) count };
}
#undef HETERPS_PLACE

constexpr int kLayerFeatures = layer_feature::count;
constexpr int kStateFeatures = state_feature::count;

}  // namespace heterps::scheduler
