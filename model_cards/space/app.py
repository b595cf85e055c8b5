"""The page: plain against decayed autoencoder on a picture of yours, and pictures that a decayed generator draws.

python app.py
"""

import gradio as gr
from compare import GENERATORS, KINDS, class_names, compare, draw, gallery


INTRODUCTION = """
# Decayed identity shortcuts, looked at

In every residual block `x <- alpha * x + f(x)`, with alpha falling from 1 to `shortcut_decay` over the depth
([Zhang et al., CVPR 2026](https://arxiv.org/abs/2404.10947)). Two small masked autoencoders, trained for as many steps on the
same images, look at the same picture: an ordinary one, and one with the decay and what belongs to it (a decoder that sees
the image through skips from the encoder, branches that start at zero). Half an hour on a CPU, images of 28 or 32 pixels: see
how features differ, and expect no miracles.
"""
NO_NEIGHBOURS = "There are no neighbours to show: CIFAR-100, whose images they are, could not be loaded here."


def show_if_there(kind, image, *settings):
    """When something else than the button asks: nothing happens before there is a picture."""
    return show(kind, image, *settings) if image is not None else [gr.skip()] * 6


def show(kind, image, mask_ratio, layer, seed):
    if image is None:
        gr.Warning("Upload a picture, or click on one of those below, first.")
        return [gr.skip()] * 6
    shown = []
    for found in compare(kind, image, mask_ratio, int(layer), int(seed or 0)):
        text = f"`shortcut_decay` {found['decay']:g}. Colours: three components, {100 * found['share']:.0f} % of the variance."
        if not found["neighbours"]:
            text += f" {NO_NEIGHBOURS}"
        captions = {"image": "your picture", "seen": "seen", "reconstructed": "completed", "components": "features"}
        shown += [text, [(found[name], caption) for name, caption in captions.items()], found["neighbours"]]
    return shown


def draw_class(which, name, count, steps, guidance, seed, progress=gr.Progress()):  # noqa: B008, how gradio finds it
    if name not in class_names(which):  # the list has not followed yet
        name = class_names(which)[0]
    return draw(
        which, name, int(count), int(steps), guidance, int(seed or 0), lambda done, steps: progress((done, steps))
    )


def pictures(label, columns, height):
    # Its label would lie on the first picture.
    return gr.Gallery(label=label, show_label=False, columns=columns, height=height, object_fit="contain")


def offer_classes(which, name):
    names = class_names(which)
    return gr.Dropdown(choices=names, value=name if name in names else names[0])


with gr.Blocks(title="Decayed identity shortcuts", delete_cache=(3600, 3600)) as page:
    gr.Markdown(INTRODUCTION)
    with gr.Tab("Features"):
        with gr.Row():
            with gr.Column(scale=1, min_width=260):
                kind = gr.Radio(list(KINDS), value="clothes", label="Trained on")
                image = gr.Image(type="pil", image_mode=None, label="Picture", height=240)  # transparency is kept
                mask_ratio = gr.Slider(0.25, 0.9, value=0.75, step=0.05, label="Share that is hidden")
                layer = gr.Slider(0, 12, value=12, step=1, label="Features after layer")
                seed = gr.Number(0, precision=0, minimum=0, maximum=2**32 - 1, label="Seed of the mask")
                button = gr.Button("Compare", variant="primary")
            outputs = []
            for title in ("Plain", "Decayed"):
                with gr.Column(scale=2, min_width=320):
                    gr.Markdown(f"### {title}")
                    outputs += [
                        gr.Markdown(),
                        pictures("Reconstruction and features", columns=2, height=520),
                        pictures("Nearest neighbours", columns=4, height=280),
                    ]
        gr.Examples(
            [each.resize((112, 112)) for each in gallery("clothes")[0][:12]],
            image,
            label="Clothes to try",
            examples_per_page=12,
        )
        gr.Markdown(
            "Clothes are put on black and made grey, photographs cut to a square, both shrunk to what the models take. Models "
            "of normalised patches do not know a patch's brightness: the completed picture borrows it. Neighbours are by the "
            "cosine of mean features, among 1,000 test images of Fashion-MNIST (2,000 of CIFAR-100)."
        )
        settings = [kind, image, mask_ratio, layer, seed]
        button.click(show, settings, outputs, api_name="compare")
        changes = [kind.change, image.change, mask_ratio.release, layer.release]
        gr.on(changes, show_if_there, settings, outputs, api_visibility="private")
    with gr.Tab("Samples"):
        with gr.Row():
            with gr.Column(scale=1, min_width=260):
                which = gr.Radio(list(GENERATORS), value=next(iter(GENERATORS)), label="Generator")
                names = class_names(which.value)
                name = gr.Dropdown(names, value=names[0], label="Class")
                count = gr.Slider(1, 16, value=8, step=1, label="How many")
                steps = gr.Slider(5, 100, value=25, step=5, label="Steps")
                guidance = gr.Slider(1, 5, value=2, step=0.5, label="Guidance (1 is none)")
                drawn_seed = gr.Number(0, precision=0, minimum=0, maximum=2**32 - 1, label="Seed")
                draw_button = gr.Button("Draw", variant="primary")
            with gr.Column(scale=3):
                samples = pictures("Samples", columns=4, height=640)
        which.change(offer_classes, [which, name], name, api_name="classes")
        draw_button.click(draw_class, [which, name, count, steps, guidance, drawn_seed], samples, api_name="draw")


if __name__ == "__main__":
    page.queue(max_size=20).launch(max_file_size="20mb", show_error=True)
