//! Doctests of the README and of the book. A crate of its own, so that the library can be packaged without the pages.

#![forbid(unsafe_code)]

/// The pages with Rust code.
#[cfg(doctest)]
mod pages {
    macro_rules! pages {
        ($($name:ident: $page:literal,)*) => {$(
            #[doc = include_str!(concat!("../../../", $page))]
            struct $name;
        )*};
    }

    pages! {
        Readme: "README.md",
        Library: "crates/tenure/README.md",
        Elections: "docs/elections.md",
        Fencing: "docs/fencing.md",
        HandOff: "docs/handoff.md",
        Jobs: "docs/jobs.md",
        Nats: "docs/nats.md",
        Object: "docs/object.md",
        PostgresAdvisory: "docs/postgres-advisory.md",
        Start: "docs/start.md",
        Testing: "docs/testing.md",
    }
}
