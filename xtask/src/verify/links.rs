//! Check of links between the Markdown files of the repository: the file and the heading exist.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

pub(super) fn check(root: &Path) -> Result<()> {
    let mut faults = Vec::new();
    for file in markdown_files(root)? {
        faults.extend(faults_of(root, &file)?);
    }
    if !faults.is_empty() {
        bail!("{}", faults.join("\n"));
    }
    Ok(())
}

fn faults_of(root: &Path, file: &Path) -> Result<Vec<String>> {
    let page = MarkdownPage::parse(&read(file)?);
    let name = file.strip_prefix(root).unwrap_or(file).display();
    let faults = page
        .links
        .iter()
        .filter_map(|link| Some(format!("{name}: {link}: {}", fault(root, file, link)?)));
    Ok(faults.collect())
}

/// Reason why a link is broken; `None` if it is valid.
fn fault(root: &Path, file: &Path, link: &str) -> Option<&'static str> {
    let (path, heading) =
        link.split_once('#').map_or((link, None), |(path, heading)| (path, Some(heading)));
    let target = if path.is_empty() {
        file.to_owned()
    } else if let Some(path) = path.strip_prefix('/') {
        normal(&root.join(path))
    } else {
        normal(&file.parent()?.join(path))
    };
    if !target.starts_with(root) {
        return Some("leads out of the repository");
    }
    if !target.exists() {
        return Some("no such file");
    }
    let heading = heading.filter(|_| is_markdown(&target))?;
    let headings =
        read(&target).map(|text| MarkdownPage::parse(&text).headings).unwrap_or_default();
    (!headings.contains(heading)).then_some("no such heading")
}

/// Links and headings of a Markdown file.
#[derive(Default)]
struct MarkdownPage {
    /// Links to other files, or within this file.
    links: Vec<String>,
    /// Headings, each as the anchor of a link to it.
    headings: BTreeSet<String>,
}

impl MarkdownPage {
    fn parse(text: &str) -> Self {
        let mut page = Self::default();
        let mut heading: Option<String> = None;
        for event in Parser::new_ext(text, Options::ENABLE_TABLES) {
            match event {
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. })
                    if is_local(&dest_url) =>
                {
                    page.links.push(dest_url.into_string());
                }
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::Text(text) | Event::Code(text) => {
                    if let Some(heading) = &mut heading {
                        heading.push_str(&text);
                    }
                }
                Event::End(TagEnd::Heading(_)) => {
                    page.add_heading(&heading.take().unwrap_or_default());
                }
                _ => {}
            }
        }
        page
    }

    /// Adds a heading. The second heading of the same text gets the suffix `-1`, as on GitHub.
    fn add_heading(&mut self, text: &str) {
        let plain = anchor(text);
        let numbered = (1..).map(|number| format!("{plain}-{number}"));
        let free = std::iter::once(plain.clone())
            .chain(numbered)
            .find(|name| !self.headings.contains(name));
        self.headings.extend(free);
    }
}

/// The anchor of a heading in a link: lower case, blanks as hyphens, no punctuation.
fn anchor(heading: &str) -> String {
    let kept = heading.trim().chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// True unless the link leads to another machine: such links are not checked.
fn is_local(link: &str) -> bool {
    let scheme = link.split_once(':').map(|(scheme, _)| scheme);
    scheme.is_none_or(|scheme| scheme.contains(['/', '#', '.'])) && !link.starts_with("//")
}

/// Resolves `.` and `..` lexically, so that a link out of the repository is found even if its target does not exist.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => {
                normal.pop();
            }
            other => normal.push(other),
        }
    }
    normal
}

/// Every Markdown file outside generated, fetched and hidden folders.
fn markdown_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let entries = fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))?;
    for entry in entries {
        let entry = entry.with_context(|| format!("reading {}", folder.display()))?;
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if is_folder && !name.starts_with('.') && name != "target" && name != "node_modules" {
            files.extend(markdown_files(&path)?);
        } else if !is_folder && is_markdown(&path) {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn is_markdown(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "md")
}

fn read(file: &Path) -> Result<String> {
    fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stores::Folder;

    /// The faults of a small repository whose README has this text.
    fn faults(name: &str, readme: &str) -> Vec<String> {
        let folder = Folder::create(name).unwrap();
        fs::create_dir_all(folder.path().join("docs")).unwrap();
        fs::write(folder.path().join("docs/a.md"), "# The `first` one!\n\n[back](../README.md)\n")
            .unwrap();
        fs::write(folder.path().join("LICENSE"), "free\n").unwrap();
        fs::write(folder.path().join("README.md"), readme).unwrap();
        let outcome = check(folder.path());
        outcome.map_or_else(
            |error| error.to_string().lines().map(str::to_owned).collect(),
            |()| vec![],
        )
    }

    #[test]
    fn links_that_lead_somewhere_are_fine() {
        let readme = "# Title\n\n## Twice\n\n## Twice\n\n[a](docs/a.md) [b](./docs/a.md#the-first-one) [c](#title)
[d](#twice-1) [e](docs) [f](/LICENSE) [g][ref] [h](https://example.org/x.md) [i](mailto:a@example.org)

[ref]: LICENSE\n";
        assert_eq!(faults("links-fine", readme), [""; 0]);
    }

    #[test]
    fn links_in_code_are_text() {
        let readme = "`[a](nowhere.md)`\n\n```text\n[b](nowhere.md)\n```\n";
        assert_eq!(faults("links-code", readme), [""; 0]);
    }

    #[test]
    fn links_to_nowhere_are_named() {
        let readme = "[a](docs/b.md)\n\n[b](docs/a.md#second)\n\n[c](#none)\n\n[d](../x.md)\n\n![e](no.png)\n\n[f][ref]\n\n[ref]: gone\n";
        assert_eq!(
            faults("links-nowhere", readme),
            [
                "README.md: docs/b.md: no such file",
                "README.md: docs/a.md#second: no such heading",
                "README.md: #none: no such heading",
                "README.md: ../x.md: leads out of the repository",
                "README.md: no.png: no such file",
                "README.md: gone: no such file",
            ]
        );
    }
}
