"""The architectures that tests convert, and why others are not among them."""


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


ARCHITECTURES = _names("""
    afmoe aimv2 aimv2_vision_model albert altclip apertus apertus1p5_text arcee aria_text
    audio-spectrogram-transformer axk1 axk2 bailing_hybrid bamba bart beam beit bert bert-generation big_bird
    bigbird_pegasus biogpt bitnet blenderbot blenderbot-small blip blip_2_qformer bloom bridgetower bros
    camembert canary canine chinese_clip chinese_clip_vision_model clip clip_text_model clip_vision_model
    clipseg codegen cohere cohere2 cohere2_moe cohere_asr cohere_compass_text cohere_compass_vision convbert
    convnext convnextv2 cosmos3_edge_text cosmos3_edge_vision cpmant ctrl cwm data2vec-audio data2vec-text
    data2vec-vision dbrx deberta deberta-v2 decision_transformer deepseek_v2 deepseek_v3 deepseek_v32
    deepseek_v4 deit diffllama diffusion_gemma dinov2 dinov2_with_registers dinov3_convnext dinov3_vit
    distilbert doge donut-swin dots1 dots3_note_text dpr dpt electra embedding_gemma2_text encoder-decoder ernie
    ernie4_5 ernie4_5_moe esm esmc eurobert evolla exaone exaone4 exaone4_5_vision exaone_moe falcon falcon_h1
    falcon_mamba flaubert flava flex_olmo flint focalnet fsmt funnel gemma gemma2 gemma3_text gemma3n_text
    gemma4_text gemma4_unified_text git glm glm4 glm4_moe glm4_moe_lite glm4v_moe_text glm4v_moe_vision
    glm4v_text glm4v_vision glm5_next_text glm5_next_vision glm_image_text glm_image_vision glm_moe_dsa
    glm_ocr_text glm_ocr_vision glmasr_encoder glpn gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese
    gpt_oss gptj granite granite_docling_text granite_docling_vision granite_swa granitemoe granitemoe_swa
    granitemoehybrid granitemoeshared groupvit gte helium hiera higgs_audio_v2 hrm_text hubert hunyuan_v1_dense
    hunyuan_v1_moe hunyuan_vl_text hunyuan_vl_vision hy_v3 hy_v4 hy_v4_vl_text hy_v4_vl_vision hyperclovax ibert
    idefics3_vision ijepa informer inkling2_loop_text inkling2_text inkling_text internlm3 internvl_vision
    iquestcoder jais2 jamba jetmoe jina_embeddings_v3 kimi_linear kolibri1 kosmos-2.5 laguna lara_mini lasr_ctc
    lasr_encoder layoutlm layoutlmv3 led levit lfm2 lfm2_moe lfm3 lfm3_vl_vision lilt llama llama4_text
    longcat_flash longformer longt5 luke lxmert m2m_100 mamba mamba2 marian markuplm maskformer maskformer-swin
    mbart megatron-bert mellum metaclip_2 mgp-str mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text
    ministral ministral3 mistral mistral4 mistral_large4_text mixtral mlcd mlcd_vision_model mllama mobilebert
    modernbert modernbert-decoder molmo2_text moonshine moshi moss_transcribe_diarize_audio mpnet mpt mt5
    muse_glimmer_text muse_spark_text mvp nanochat nemotron nemotron3_5_asr nemotron3_5_transcribe_asr_audio
    nemotron3_diarization_audio nemotron_asr_streaming nemotron_asr_streaming_encoder nemotron_h neomme nllb-moe
    nomic_bert nystromformer olmo olmo2 olmo3 olmo_hybrid olmoe omniasr omniasr_audio omniasr_ctc openai-gpt
    openai_privacy_filter opt owlv2 owlvit parakeet_ctc parakeet_encoder parakeet_rnnt parakeet_tdt patchtsmixer
    patchtst pegasus pegasus_x perceiver persimmon phi phi3 phi4_multimodal phimoe pixio pixtral plbart
    prophetnet pvt pvt_v2 qianfan_ocr_vision qwen2 qwen2_5_vl_text qwen2_5_vl_vision qwen2_audio_encoder
    qwen2_moe qwen2_vl_text qwen3 qwen3_5_moe_text qwen3_5_moe_vision qwen3_5_text qwen3_5_vision qwen3_moe
    qwen3_next qwen3_omni_moe_thinker qwen3_vl_moe_text qwen3_vl_moe_vision qwen3_vl_text qwen3_vl_vision
    qwen4_exp_text qwen4_exp_vision radio recurrent_gemma reformer rembert roberta roberta-prelayernorm roc_bert
    roformer rwkv sam3_vision_model sam3_vit_model sam_hq_vision_model sam_vision_model sapiens2 sarvam_mla
    sarvam_moe seamless_m4t seamless_m4t_v2 seed_oss segformer sew sew-d siglip siglip2_vision_model
    siglip_vision_model smollm3 smolvlm_vision solar_open speech_to_text speecht5 splinter squeezebert stablelm
    starcoder2 step3p7 swin swinv2 switch_transformers t5 t5gemma t5gemma2 tapas time_series_transformer
    timesformer tipsv2_text_model tipsv2_vision_model trocr udop ultrabert umt5 unispeech unispeech-sat
    unlimited_ocr vaultgemma videomae videoprism_vision_model vilt vision-text-dual-encoder visual_bert vit
    vit_mae vit_msn vitdet vivit voxtral_encoder voxtral_realtime_encoder wav2vec2 wav2vec2-bert
    wav2vec2-conformer wavlm whisper xglm xlm xlm-roberta xlm-roberta-xl xlnet xlstm xmod yolos yoso youtu zamba
    zamba2 zaya
""")
"""Model types of transformers. Each has an MLP, norms or experts."""

EXCLUDED: dict[str, tuple[str, ...]] = {
    "no linear layer, and no norm or experts that convert changes": _names("""
    bit dac encodec hgnet_v2 imagegpt mobilenet_v1 mobilenet_v2 poolformer pp_ocrv6_medium_det regnet resnet
    textnet univnet
    """),
    "needs a package that is not locked: timm, Pillow, natten, torchaudio, detectron2 or scipy": _names("""
    conditional_detr dab-detr deformable_detr detr dinat edgetam edgetam_vision_model fast_vlm gemma3n
    gemma3n_vision higgs_audio_v2_tokenizer inkling_mm_model layoutlmv2 omdet-turbo pe_audio_video
    pe_audio_video_encoder pe_video pe_video_encoder perception_lm table-transformer timm_backbone timm_wrapper
    """),
    "a wrapper: its language model is listed, and so are towers with a model of their own": _names("""
    aria audioflamingo3 aya_vision blip-2 chameleon cohere2_vision cohere_compass cosmos3_edge cosmos3_omni
    deepseek_ocr2 deepseek_vl deepseek_vl_hybrid dots3_note embedding_gemma2 emu3 ernie4_5_vl_moe exaone4_5
    florence2 fuyu gemma3 gemma4 gemma4_assistant gemma4_unified gemma4_unified_assistant glm46v glm4v glm4v_moe
    glm5_next glm_image glm_ocr glmasr glmga got_ocr2 granite4_vision granite_docling granite_speech
    granite_speech5_ctc granite_speech_plus hunyuan_vl hy_v4_vl hyperclovax_vision_v2 idefics2 idefics3 inkling2
    inkling2_loop instructblip instructblipvideo internvl janus kimi_k25 kosmos-2 lfm2_vl lfm3_vl lighton_ocr
    llama4 llava llava_next llava_next_video llava_onevision minicpm_ocr minicpmv4_6 minicpmv4_7 minimax_m3_vl
    mistral3 mistral_large4 modernvbert molmo2 moss_transcribe_diarize muse_glimmer muse_spark musicflamingo
    ovis2 paddleocr_vl paligemma qianfan_ocr qwen2_5_omni_thinker qwen2_5_vl qwen2_audio qwen2_vl qwen3_5
    qwen3_5_moe qwen3_asr qwen3_vl qwen3_vl_moe qwen4_exp siglip2 smolvlm tipsv2 ultravbert vibevoice
    vibevoice_asr video_llama_3 video_llava vipllava voxtral voxtral_realtime voxtral_realtime_text
    """),
    "not in bfloat16 on the CPU: a Fourier transform, or a layer that mixes dtypes": _names("""
    autoformer fastspeech2_conformer fastspeech2_conformer_with_hifigan fnet mra
    """),
    "takes more than a second a call at its smallest": _names("""
    vjepa2
    """),
    "no tiny config or inputs: sizes depend on each other, or calls take masks, grids or codes": _names("""
    align apertus1p5 audioflamingo3_encoder bark blt clap clvp csm cvt d_fine deimv2 depth_pro dia dory
    edgetam_video efficientloftr efficientnet fun_asr_nano fun_asr_nano_encoder gemma3n_audio gemma4_audio
    gemma4_vision glm_image_vqmodel gradium_phonon_tts granite_speech5_encoder grounding-dino idefics
    inkling2_vision kimi_k25_vision kyutai_speech_to_text lightglue lw_detr mask2former mimi mimi_decoder
    mimi_encoder minicpm_ocr_vision minicpmv4_7_vision mm-grounding-dino mobilevit mobilevitv2
    moonshine_streaming muse_glimmer_assistant muse_glimmer_vision muse_spark_audio muse_spark_vision musicgen
    musicgen_melody nemo_speechlm nemotron3_5_transcribe_audio nemotron3_5_transcribe_word_timestamp
    nemotron3_diarization neucodec oneformer pe_audio pe_audio_encoder pi0 pocket_tts pocket_tts_audio_tokenizer
    pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder pp_doclayout_v3 pp_doclayout_v4
    pp_ocrv5_mobile_rec pp_ocrv5_server_rec pp_ocrv6_small_det pp_ocrv6_small_rec pp_ocrv6_tiny_rec
    qwen3_asr_encoder rf_detr rt_detr rt_detr_v2 sam sam2 sam2_hiera_det_model sam2_video sam2_vision_model sam3
    sam3_lite_text sam3_lite_text_text_model sam3_tracker sam3_tracker_video sam3_video sam_hq seggpt
    swiftformer swin2sr t5gemma2_encoder timesfm timesfm2_5 tvp uvdoc vibevoice_acoustic_tokenizer
    vibevoice_acoustic_tokenizer_decoder vibevoice_acoustic_tokenizer_encoder video_llama_3_vision videoprism
    vits wavtokenizer wavtokenizer_encoder xclip xcodec xcodec2
    """),
}
"""Why model types are not tested -> which. A type without a model class in transformers' auto mappings is part of
another."""
