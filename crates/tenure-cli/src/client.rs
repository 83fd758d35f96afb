//! The settings that every client of this process starts from.

use std::sync::OnceLock;

use tenure::ClientBuilder;

static BUILDER: OnceLock<ClientBuilder> = OnceLock::new();

/// Sets the builder of all clients. Called once, before any command runs.
pub(crate) fn set_builder(builder: ClientBuilder) {
    assert!(BUILDER.set(builder).is_ok(), "main_with is called once");
}

/// A builder that knows the URL schemes of this program.
pub(crate) fn builder() -> ClientBuilder {
    BUILDER.get().cloned().unwrap_or_default()
}
