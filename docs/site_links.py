"""Links of the site (a hook of mkdocs): pages are written to be read in the repository, where they point outside of `docs/`.

Pictures outside of `docs/` are copied into the site. Links to other files of the repository lead to `repo_url`, if
mkdocs.yml has one, and are plain text otherwise.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File


PICTURES = {".png", ".gif", ".jpg"}
OUTSIDE_LINK = re.compile(r"(!?)\[([^\]]*)\]\(\.\./([^)#\s]+)(#[^)]*)?\)")


def on_files(files, config):
    root = Path(config.config_file_path).parent
    for page in list(files.documentation_pages()):
        for _, _, target, _ in OUTSIDE_LINK.findall(page.content_string):
            source = root / target
            if not source.exists():
                raise FileNotFoundError(f"{page.src_uri} links to '../{target}', which does not exist.")
            if source.suffix in PICTURES and files.get_file_from_path(target) is None:
                files.append(File.generated(config, target, abs_src_path=str(source)))
    return files


def on_page_markdown(markdown, page, config, files):
    def rewrite(match):
        picture, text, target, _ = match.groups()
        if Path(target).suffix in PICTURES:
            return f"{picture}[{text}]({target})"
        return f"[{text}]({config.repo_url}/tree/main/{target})" if config.repo_url else text

    return OUTSIDE_LINK.sub(rewrite, markdown)
