"""What the kinds of transformers models share."""

from ._kind import ModelFolder


FEATURE_LIMITS = "Features for nearest neighbours, probes and fine-tuning of images like those it was trained on; nothing else was tried."
CLASSIFIER_LIMITS = "It knows the classes and the kind of images that it was trained on; confident answers about other images mean nothing."


def image_model_usage(folder: ModelFolder, name: str, results: dict) -> str:
    """Features or logits of one image."""
    grey = folder.config.get("num_channels") == 1
    imports = "import numpy as np\nfrom PIL import Image\n" if grey else "from PIL import Image\n"
    # The processor needs a channel axis, which grey images lack.
    pixels = 'pixels = np.asarray(image.convert("L"))[..., None]\n' if grey else ""
    image = 'pixels, input_data_format="channels_last"' if grey else "image"
    colours = "" if grey else '.convert("RGB")'
    if folder.kind.classes[folder.class_name].task == "image-classification":
        auto, output = "AutoModelForImageClassification", "logits"
    else:
        auto, output = "AutoModel", "pooler_output"
    return (
        f"{imports}from transformers import AutoImageProcessor, {auto}\n\n"
        f'image = Image.open("picture.png"){colours}\n'
        f'processor = AutoImageProcessor.from_pretrained("{name}")\n'
        f'model = {auto}.from_pretrained("{name}", trust_remote_code=True)  # pin `revision`\n'
        f'{pixels}{output} = model(**processor({image}, return_tensors="pt")).{output}'
    )
