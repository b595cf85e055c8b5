"""The page: plain against decayed autoencoder on a picture of yours, pictures that a decayed generator draws, relighting.

python app.py
"""

from functools import wraps

import gradio as gr
from compare import (
    GENERATORS,
    KINDS,
    RANGES,
    VisitorError,
    class_names,
    compare,
    draw,
    gallery,
    read_picture,
)
from relighting_demo import load_scenes, relight


INTRODUCTION = """
# Decayed identity shortcuts, looked at

In every residual block `x <- alpha * x + f(x)`, with alpha falling from 1 to `shortcut_decay` over the depth
([Zhang et al., CVPR 2026](https://arxiv.org/abs/2404.10947)). Two small masked autoencoders, trained for as many steps on the
same images, look at the same picture: an ordinary one, and one with the decay and what belongs to it (a decoder that sees
the image through skips from the encoder, branches that start at zero). Half an hour on a CPU, images of 28 or 32 pixels: see
how features differ, and expect no miracles.
"""
PAIRS = [(0, 7), (6, 14), (12, 21), (18, 5), (1, 15), (8, 22)]  # of scenes to relight, and their references
NO_NEIGHBOURS = "There are no neighbours to show: CIFAR-100, whose images they are, could not be loaded here."
# One call computes at a time and 20 wait; without `api_open=False`, requests to the API could pass the queue by.
QUEUE = {"max_size": 20, "default_concurrency_limit": 1, "api_open": False}
LAUNCH = {"max_file_size": "20mb", "max_threads": 8, "show_error": True}
ONE_AT_A_TIME = {"concurrency_limit": 1, "concurrency_id": "models"}  # the events share one limit


def explain(function):
    """Shows the sentence of a `VisitorError` on the page, without a traceback in the log."""

    @wraps(function)
    def call(*arguments, **options):
        try:
            return function(*arguments, **options)
        except VisitorError as error:
            raise gr.Error(str(error), print_exception=False) from error

    return call


@explain
def open_upload(payload):
    """The uploaded picture. Gradio's own reading would decode it before anything could look at its size."""
    if payload is None:
        return None
    if not payload.path or (payload.url or "").startswith("data:"):
        raise VisitorError("Upload the picture as a file.")
    return read_picture(payload.path)


@explain
def show_if_there(kind, image, *settings):
    """When something else than the button asks: nothing happens before there is a picture."""
    return show(kind, image, *settings) if image is not None else [gr.skip()] * 6


@explain
def show(kind, image, mask_ratio, layer, seed):
    if image is None:
        gr.Warning("Upload a picture, or click on one of those below, first.")
        return [gr.skip()] * 6
    shown = []
    for result in compare(kind, image, mask_ratio, layer, seed or 0):
        share = f"{100 * result['share']:.0f} %"
        text = f"`shortcut_decay` {result['decay']:g}. Colours: three components, {share} of the variance."
        if not result["neighbours"]:
            text += f" {NO_NEIGHBOURS}"
        captions = {"image": "your picture", "seen": "seen", "reconstructed": "completed", "components": "features"}
        shown += [text, [(result[name], caption) for name, caption in captions.items()], result["neighbours"]]
    return shown


@explain
def draw_class(which, name, count, steps, guidance, seed, progress=gr.Progress()):  # noqa: B008, how gradio finds it
    names = class_names(which)
    if name not in names:  # the list has not followed yet
        name = names[0]
    return draw(which, name, count, steps, guidance, seed or 0, lambda step, steps: progress((step, steps)))


@explain
def relight_picture(image, reference):
    if image is None or reference is None:
        gr.Warning("Upload a picture and a reference, or click on a pair below, first.")
        return [gr.skip()] * 2
    result = relight(image, reference)
    captions = {"image": "picture", "reference": "reference", "relit": "relit", "albedo": "without light"}
    return [(result[name], caption) for name, caption in captions.items()], result["frames"]


def seed_field(label):
    lowest, highest = RANGES["seed"]
    return gr.Number(0, precision=0, minimum=lowest, maximum=highest, label=label)


def pictures(label, columns, height):
    # Its label would lie on the first picture.
    return gr.Gallery(label=label, show_label=False, columns=columns, height=height, object_fit="contain")


@explain
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
                image.preprocess = open_upload
                mask_ratio = gr.Slider(*RANGES["mask_ratio"], value=0.75, step=0.05, label="Share that is hidden")
                layer = gr.Slider(*RANGES["layer"], value=12, step=1, label="Features after layer")
                seed = seed_field("Seed of the mask")
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
            [picture.resize((112, 112)) for picture in gallery("clothes")[0][:12]],
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
        button.click(show, settings, outputs, api_name="compare", **ONE_AT_A_TIME)
        changes = [kind.change, image.change, mask_ratio.release, layer.release]
        gr.on(changes, show_if_there, settings, outputs, api_visibility="private", **ONE_AT_A_TIME)
    with gr.Tab("Samples"):
        with gr.Row():
            with gr.Column(scale=1, min_width=260):
                which = gr.Radio(list(GENERATORS), value=next(iter(GENERATORS)), label="Generator")
                names = class_names(which.value)
                name = gr.Dropdown(names, value=names[0], label="Class")
                count = gr.Slider(*RANGES["count"], value=8, step=1, label="How many")
                steps = gr.Slider(*RANGES["steps"], value=25, step=5, label="Steps")
                guidance = gr.Slider(*RANGES["guidance"], value=2, step=0.5, label="Guidance (1 is none)")
                drawn_seed = seed_field("Seed")
                draw_button = gr.Button("Draw", variant="primary")
            with gr.Column(scale=3):
                samples = pictures("Samples", columns=4, height=640)
        which.change(offer_classes, [which, name], name, api_name="classes", **ONE_AT_A_TIME)
        settings = [which, name, count, steps, guidance, drawn_seed]
        draw_button.click(draw_class, settings, samples, api_name="draw", **ONE_AT_A_TIME)
    with gr.Tab("Relighting"):
        gr.Markdown(
            "A small autoencoder has learned from pairs of pictures of one scene to tell what a scene is from how it is lit. It "
            "gives the picture the light of the reference; without a light it resembles the colours of the surfaces. It "
            "knows procedural scenes like those below, and nothing of photographs."
        )
        with gr.Row():
            with gr.Column(scale=1, min_width=260):
                lit = gr.Image(type="pil", image_mode=None, label="Picture", height=240)
                reference = gr.Image(type="pil", image_mode=None, label="Reference", height=240)
                for upload in (lit, reference):
                    upload.preprocess = open_upload
                relight_button = gr.Button("Relight", variant="primary")
            with gr.Column(scale=3):
                relit = pictures("Relit", columns=4, height=300)
                frames = pictures("From its own light to that of the reference", columns=7, height=200)
        scenes = load_scenes()
        gr.Examples(
            [[scenes[first].resize((128, 128)), scenes[second].resize((128, 128))] for first, second in PAIRS],
            [lit, reference],
            label="Pairs to try",
        )
        relight_button.click(relight_picture, [lit, reference], [relit, frames], api_name="relight", **ONE_AT_A_TIME)


if __name__ == "__main__":
    page.queue(**QUEUE).launch(**LAUNCH)
