//! A pair of things, one for the keys and one for the values.

/// One `T` for the keys and one for the values, whose fill levels always differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct KeyValue<T> {
    /// For the keys.
    pub keys: T,
    /// For the values.
    pub values: T,
}

impl<T> KeyValue<T> {
    /// A pair.
    pub const fn new(keys: T, values: T) -> Self {
        Self { keys, values }
    }

    /// Applies `f` to both.
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> KeyValue<U> {
        KeyValue { keys: f(self.keys), values: f(self.values) }
    }

    /// Combines two pairs element by element.
    pub fn zip<U>(self, other: KeyValue<U>) -> KeyValue<(T, U)> {
        KeyValue { keys: (self.keys, other.keys), values: (self.values, other.values) }
    }
}

impl<T: Clone> KeyValue<T> {
    /// The same for both.
    pub fn both(value: T) -> Self {
        Self { keys: value.clone(), values: value }
    }
}
