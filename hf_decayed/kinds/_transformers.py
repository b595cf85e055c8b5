"""What the kinds of transformers models share."""

from ._kind import ModelFolder


FEATURE_LIMITS = "Features for nearest neighbours, probes and fine-tuning of images like those it was trained on; nothing else was tried."
CLASSIFIER_LIMITS = "It knows the classes and the kind of images that it was trained on; confident answers about other images mean nothing."


def image_model_usage(folder: ModelFolder, name: str, results: dict) -> str:
    """Features or logits of one image."""
    # The processor of a grey model is code of the repository; the others are transformers' own.
    grey = folder.config.get("num_channels") == 1
    trust, colours = (", trust_remote_code=True", "") if grey else ("", '.convert("RGB")')
    if folder.kind.classes[folder.class_name].task == "image-classification":
        auto, output = "AutoModelForImageClassification", "logits"
    else:
        auto, output = "AutoModel", "pooler_output"
    return (
        f"from PIL import Image\nfrom transformers import AutoImageProcessor, {auto}\n\n"
        f'image = Image.open("picture.png"){colours}\n'
        f'processor = AutoImageProcessor.from_pretrained("{name}"{trust})\n'
        f'model = {auto}.from_pretrained("{name}", trust_remote_code=True)  # pin `revision`\n'
        f'{output} = model(**processor(image, return_tensors="pt")).{output}'
    )
