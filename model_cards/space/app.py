"""The page: autoencoders without and with decay on a picture of yours, pictures that a decayed generator draws, relighting.

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
    examples,
    is_available,
    read_picture,
)
from relighting_demo import load_scenes, relight


INTRODUCTION = """
# Decayed identity shortcuts

In every residual block `x <- alpha * x + f(x)`, with alpha falling from 1 to `shortcut_decay` over the depth
([Zhang et al., CVPR 2026](https://arxiv.org/abs/2404.10947)). Two small masked autoencoders look at the same picture, one
without and one with decay. With it, features tell less of *where* a patch is and more of *what* it shows.
"""
ABOUT = """
**Features**: three principal components of patch features as red, green and blue. **Segments**: the nearest of six k-means
clusters. Components and clusters come from the patches of 200 test images, so that the colours of a model can be compared
between pictures; features are computed at 16 shifts of the picture. **Neighbours**: by the cosine of mean features, among 1,000
test images of Fashion-MNIST (2,000 of CIFAR-100). **Completed**: models of normalised patches do not know a patch's
brightness, so it is borrowed from the picture.

Pictures are shrunk to the 28 or 32 pixels of the models, which were trained for less than an hour on a CPU. Grey clothes are
put on black; other pictures are cut to a square. Both models saw the same images in the same order.
"""
FEATURES = {"components": "features", "segments": "segments"}  # captions of a model's pictures
MASKED = {"seen": "seen", "reconstructed": "completed"}
FIRST_STEPS = 10  # of the samples that are there when the page starts
PAIRS = [(0, 7), (6, 14), (12, 21), (18, 5), (1, 15), (8, 22)]  # of scenes to relight, and their references
NO_NEIGHBOURS = "There are no neighbours to show: CIFAR-100, whose images they are, could not be loaded here."
# One call computes at a time and 20 wait; without `api_open=False`, requests to the API could pass the queue by.
QUEUE = {"max_size": 20, "default_concurrency_limit": 1, "api_open": False}
# Galleries are as high as their pictures, which may be small: Gradio's own are 450 pixels high, with 100 for a picture.
STYLE = """
.fixed-height { min-height: 0 !important; max-height: none !important; }
.grid-wrap { overflow-y: auto !important; }
.grid-container {
    grid-template-columns: repeat(var(--grid-cols), minmax(0, 1fr)) !important;
    grid-template-rows: none !important;
    grid-auto-rows: auto !important;
}
"""
LAUNCH = {"max_file_size": "20mb", "max_threads": 8, "show_error": True, "css": STYLE}
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


def describe(result):
    """What a column of the page shows of a model: text, features and segments, neighbours, masked pictures."""
    share = f"{100 * result['share']:.0f} %"
    text = f"`shortcut_decay` {result['decay']:g}; the three components hold {share} of the variance."
    if not result["neighbours"]:
        text += f" {NO_NEIGHBOURS}"
    features, masked = ([(result[name], caption) for name, caption in names.items()] for names in (FEATURES, MASKED))
    return text, features, result["neighbours"], masked


@explain
def show(kind, image, mask_ratio, layer, seed):
    if image is None:
        gr.Warning("Upload a picture, or click on one below, first.")
        return [gr.skip()] * 8
    shown = []
    for result in compare(kind, image, mask_ratio, layer, seed or 0):
        text, features, neighbours, masked = describe(result)
        shown += [text, features, gr.Gallery(neighbours, visible=bool(neighbours)), masked]
    return shown


@explain
def show_if_there(kind, image, *settings):
    """When something else than the button asks: nothing happens before there is a picture."""
    return show(kind, image, *settings) if image is not None else [gr.skip()] * 8


@explain
def offer_examples(kind):
    shown = examples(kind)
    return gr.Gallery(shown, visible=bool(shown))


@explain
def pick_example(kind, selected: gr.SelectData):
    return examples(kind)[selected.index][0]


@explain
def draw_class(which, name, count, steps, guidance, seed, progress=gr.Progress()):  # noqa: B008, how gradio finds it
    names = class_names(which)
    if name not in names:  # the list has not followed yet
        name = names[0]
    return draw(which, name, count, steps, guidance, seed or 0, lambda step, steps: progress((step, steps)))


def relit_pictures(image, reference):
    result = relight(image, reference)
    captions = {"image": "picture", "reference": "reference", "relit": "relit", "albedo": "without light"}
    return [(result[name], caption) for name, caption in captions.items()], result["frames"]


@explain
def relight_picture(image, reference):
    if image is None or reference is None:
        gr.Warning("Upload a picture and a reference, or click on a pair below, first.")
        return [gr.skip()] * 2
    return relit_pictures(image, reference)


def seed_field(label):
    lowest, highest = RANGES["seed"]
    return gr.Number(0, precision=0, minimum=lowest, maximum=highest, label=label)


def pictures(label, columns, value=None, **options):
    # Its label would lie on the first picture.
    settings = {"show_label": False, "height": "auto", "object_fit": "contain", "buttons": [], **options}
    return gr.Gallery(value, label=label, columns=columns, **settings)


@explain
def offer_classes(which, name):
    names = class_names(which)
    return gr.Dropdown(choices=names, value=name if name in names else names[0])


with gr.Blocks(title="Decayed identity shortcuts", delete_cache=(3600, 3600)) as page:
    gr.Markdown(INTRODUCTION)
    with gr.Tab("Features and segments"):
        kinds = [kind for kind in KINDS if is_available(kind)]
        tried = examples(kinds[0])
        with gr.Row():
            with gr.Column(scale=2, min_width=260):
                image = gr.Image(  # transparency is kept
                    tried[0][0],
                    type="pil",
                    image_mode=None,
                    label="Picture",
                    height=260,
                    sources=["upload", "clipboard"],
                )
                image.preprocess = open_upload
                gr.Markdown("Upload a picture, or click on one of these:")
                gallery = pictures("Pictures to try", 3, tried, allow_preview=False)
                kind = gr.Radio(kinds, value=kinds[0], label="Models trained on", visible=len(kinds) > 1)
            outputs = []
            first = compare(kinds[0], tried[0][0], 0.75, RANGES["layer"][1], 0)
            for title, result in zip(("Without decay", "With decay"), first):
                with gr.Column(scale=3, min_width=320):
                    text, features, neighbours, masked = describe(result)
                    gr.Markdown(f"## {title}")
                    outputs += [gr.Markdown(text), pictures("Features and segments", 2, features)]
                    gr.Markdown("#### Nearest neighbours")
                    outputs.append(pictures("Nearest neighbours", 4, neighbours))
                    gr.Markdown("#### What is hidden, completed")
                    outputs.append(pictures("Masked and completed", 2, masked))
        with gr.Row():
            layer = gr.Slider(*RANGES["layer"], value=RANGES["layer"][1], step=1, label="Features after layer")
            mask_ratio = gr.Slider(*RANGES["mask_ratio"], value=0.75, step=0.05, label="Share that is hidden")
            seed = seed_field("Seed of the mask")
            button = gr.Button("Compare", variant="primary")
        gr.Markdown(ABOUT)
        settings = [kind, image, mask_ratio, layer, seed]
        button.click(show, settings, outputs, api_name="compare", **ONE_AT_A_TIME)
        changes = [kind.change, image.change, mask_ratio.release, layer.release]
        gr.on(changes, show_if_there, settings, outputs, api_visibility="private", **ONE_AT_A_TIME)
        gallery.select(pick_example, kind, image, api_visibility="private", **ONE_AT_A_TIME)
        kind.change(offer_examples, kind, gallery, api_visibility="private", **ONE_AT_A_TIME)
    with gr.Tab("Samples"):
        with gr.Row():
            with gr.Column(scale=1, min_width=260):
                which = gr.Radio(list(GENERATORS), value=next(iter(GENERATORS)), label="Generator")
                names = class_names(which.value)
                name = gr.Dropdown(names, value=names[0], label="Class")
                count = gr.Slider(*RANGES["count"], value=8, step=1, label="How many")
                steps = gr.Slider(*RANGES["steps"], value=FIRST_STEPS, step=5, label="Steps")
                guidance = gr.Slider(*RANGES["guidance"], value=2, step=0.5, label="Guidance (1 is none)")
                drawn_seed = seed_field("Seed")
                draw_button = gr.Button("Draw", variant="primary")
            with gr.Column(scale=3):
                samples = pictures("Samples", 4, draw(which.value, names[0], 8, FIRST_STEPS, 2, 0))
        which.change(offer_classes, [which, name], name, api_name="classes", **ONE_AT_A_TIME)
        settings = [which, name, count, steps, guidance, drawn_seed]
        draw_button.click(draw_class, settings, samples, api_name="draw", **ONE_AT_A_TIME)
    with gr.Tab("Relighting"):
        gr.Markdown(
            "A small autoencoder has learned from pairs of pictures of one scene to tell what a scene is from how it is lit. It "
            "gives the picture the light of the reference; without a light it resembles the colours of the surfaces. It "
            "knows procedural scenes like those below, and nothing of photographs."
        )
        scenes = load_scenes()
        pairs = [[scenes[first].resize((128, 128)), scenes[second].resize((128, 128))] for first, second in PAIRS]
        with gr.Row():
            with gr.Column(scale=1, min_width=260):
                lit = gr.Image(pairs[0][0], type="pil", image_mode=None, label="Picture", height=240)
                reference = gr.Image(pairs[0][1], type="pil", image_mode=None, label="Reference", height=240)
                for upload in (lit, reference):
                    upload.preprocess = open_upload
                relight_button = gr.Button("Relight", variant="primary")
            with gr.Column(scale=3):
                first_relit, first_frames = relit_pictures(*pairs[0])
                relit = pictures("Relit", 4, first_relit)
                gr.Markdown("From its own light to that of the reference:")
                frames = pictures("From its own light to that of the reference", 7, first_frames)
        gr.Examples(pairs, [lit, reference], label="Pairs to try", examples_per_page=3)
        relight_button.click(relight_picture, [lit, reference], [relit, frames], api_name="relight", **ONE_AT_A_TIME)


if __name__ == "__main__":
    page.queue(**QUEUE).launch(**LAUNCH)
