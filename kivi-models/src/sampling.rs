//! Choosing the next token from the logits.
//!
//! The steps always run in this order, and each is off at its neutral value:
//!
//! 1. **repetition penalty** on the raw logits, because it is defined on them (CTRL, arXiv
//!    1909.05858, section 4.1; a positive logit is divided by the penalty, a negative one
//!    multiplied);
//! 2. **temperature**, so that the three filters below judge the distribution that is sampled;
//! 3. **top-k**, the cheapest cut, first among the filters so that the others sort less;
//! 4. **top-p** (nucleus, arXiv 1904.09751) on what top-k left, renormalised;
//! 5. **min-p** (arXiv 2407.01082), relative to the most likely token, hence independent of the
//!    renormalisation;
//! 6. one draw from the tokens left.
//!
//! This is also the order of the logits processors of Hugging Face transformers. Ties are cut in
//! favour of the lower id, so that a given seed gives the same tokens everywhere.

mod config;
mod sampler;

pub use config::SamplerConfig;
pub use sampler::Sampler;
