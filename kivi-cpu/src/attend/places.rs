//! Where the groups of a tile lie in memory.

use super::{TILE, walk::Walk};
use crate::cache::Page;
use kivi_core::{PageId, SequencePlan};

/// Where a group of tokens is: a page, and the number of its first token in it.
pub(super) type Place<'a> = Option<(&'a Page, usize)>;

/// Where each group of tokens of a tile is.
pub(super) type Places<'a> = [Place<'a>; TILE / MIN_GROUP];

/// The smallest group size.
pub(super) const MIN_GROUP: usize = 16;

impl<'a> Walk<'a> {
    /// Where the groups of a tile are that starts at a position; nowhere for sinks and what has no
    /// page.
    pub(super) fn places(&self, sequence: &SequencePlan, start: usize) -> Places<'a> {
        let g = &self.layer.geometry;
        let mut places = [None; TILE / MIN_GROUP];
        if start < g.sinks {
            return places;
        }
        let (mut index, mut token) = g.locate(start);
        for place in places.iter_mut().take(TILE / g.group) {
            let id = sequence.before.tables[self.group].get(index);
            let id = id.filter(|&&id| id != PageId::DROPPED);
            let page = id.and_then(|id| self.layer.pages.get(id.index())).and_then(Option::as_ref);
            *place = page.map(|page| (page, token));
            token += g.group;
            if token == g.page_tokens {
                (index, token) = (index + 1, 0);
            }
        }
        places
    }
}
