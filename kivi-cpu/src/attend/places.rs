//! Where the groups of a tile lie in memory.

use super::{
    TILE,
    walk::{Tile, Walk},
};
use crate::cache::{KeyGroup, KeyLayout, Page, ValueGroup, ValueLayout};
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

impl<'a> Tile<'a> {
    /// A group of keys of this tile or the next.
    #[inline(always)]
    pub(super) fn key_group(&self, place: Place<'a>, layout: KeyLayout) -> Option<KeyGroup<'a>> {
        let (page, token) = place?;
        page.key_group(self.geometry(), layout, [self.kv_head, token])
    }

    /// The values of a group of tokens of this tile or the next.
    #[inline(always)]
    pub(super) fn value_group(
        &self,
        place: Place<'a>,
        layout: ValueLayout,
    ) -> Option<ValueGroup<'a>> {
        let (page, token) = place?;
        page.value_group(self.geometry(), layout, [self.kv_head, token])
    }
}
