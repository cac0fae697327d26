# SPDX-License-Identifier: Apache-2.0
"""Hooks of MkDocs: the navigation follows docs/README.md, and links to other files of the repository lead to the repository."""

import os
import re

LINK = re.compile(r"(\]\()((?:\.\./)+[^)\s]+)(\))")
NUMBERED = re.compile(r"(\]\((?:[^)\s:#]+\.md)?#)(\d)")
ENTRY = re.compile(r"^\| \[(?P<title>[^]]+)\]\((?P<path>[^)#]+)\)")


def slug(text, separator):
    """Returns the anchor that GitHub gives a heading, with a letter before a digit: the theme uses anchors as selectors."""
    return re.sub(r"^(\d)", r"n\1", re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", separator))


def on_config(config):
    version = os.environ.get("VERSION", "dev")
    config["site_name"] += " " + version
    config["extra"]["files"] = f"{config['repo_url']}/blob/{'main' if version == 'dev' else version}/"
    config["nav"] = navigation(config["docs_dir"])
    return config


def navigation(docs):
    """Returns the navigation: one menu for each section of README.md, with the pages of its table."""
    nav, pages = [{"Overview": "README.md"}], None
    with open(os.path.join(docs, "README.md"), encoding="utf-8") as index:
        for line in index:
            entry = ENTRY.match(line)
            if line.startswith("## "):
                pages = []
                nav.append({line[3:].strip(): pages})
            elif entry and not entry["path"].startswith("../"):
                path = entry["path"] + "README.md" if entry["path"].endswith("/") else entry["path"]
                pages.append({entry["title"]: path})
    return nav


def on_page_markdown(markdown, page, config, files):
    """Leads relative links that leave docs/ to the repository, and others to the anchors of slug."""
    folder = os.path.dirname(page.file.src_uri)

    def outside(link):
        target = os.path.normpath(os.path.join("docs", folder, link[2]))
        return link[0] if target.startswith("docs/") else link[1] + config["extra"]["files"] + target + link[3]

    return LINK.sub(outside, NUMBERED.sub(r"\1n\2", markdown))


def on_page_content(html, page, config, files):
    """Lets the keyboard scroll wide blocks and tables. The empty first cell of a table's head is no header."""
    html = re.sub(r"<(pre|table)>", r'<\1 tabindex="0">', html)
    return re.sub(r"<th([^>]*)></th>", r"<td\1></td>", html)


def on_post_page(output, page, config):
    """Makes the bar at the top a landmark."""
    return output.replace('<div class="navbar fixed-top', '<div role="banner" class="navbar fixed-top', 1)


def on_post_template(output, template_name, config):
    return on_post_page(output, None, config)
