//! What was found, as data and as a page.

/// x
pub struct Kernel;
/// x
pub struct Loop;
/// x
pub struct Report;
