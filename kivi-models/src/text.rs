//! From sampled tokens to text, one token at a time.

mod stop;
mod stream;

pub use stop::{StopMatcher, Stopped};
pub use stream::TokenStream;
