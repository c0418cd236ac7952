"""Sentences in twenty languages, and the language shares of answers made of them."""

from __future__ import annotations

from keel.rewards.language.share import language_share

SAMPLES: dict[str, tuple[str, ...]] = {
    "English": (
        "First we add the two numbers, then we divide by three.",
        "So the answer is seven.",
        "Let me check this again.",
        "How many apples does she have left in the basket?",
    ),
    "German": (
        "Zuerst addieren wir die beiden Zahlen, dann teilen wir durch drei.",
        "Also ist die Antwort sieben.",
        "Ich prüfe das noch einmal.",
        "Wie viele Äpfel hat sie noch im Korb?",
    ),
    "French": (
        "D'abord on additionne les deux nombres, puis on divise par trois.",
        "Donc la réponse est sept.",
        "Je vérifie encore une fois.",
        "Combien de pommes lui reste-t-il dans le panier ?",
    ),
    "Spanish": (
        "Primero sumamos los dos números y luego dividimos por tres.",
        "Entonces la respuesta es siete.",
        "Voy a comprobarlo otra vez.",
        "¿Cuántas manzanas le quedan en la cesta?",
    ),
    "Portuguese": (
        "Primeiro somamos os dois números e depois dividimos por três.",
        "Então a resposta é sete.",
        "Vou verificar mais uma vez.",
        "Quantas maçãs ainda há na cesta dela?",
    ),
    "Italian": (
        "Prima sommiamo i due numeri, poi dividiamo per tre.",
        "Quindi la risposta è sette.",
        "Controllo ancora una volta.",
        "Quante mele le restano nel cestino?",
    ),
    "Polish": (
        "Najpierw dodajemy obie liczby, potem dzielimy przez trzy.",
        "Więc odpowiedź to siedem.",
        "Sprawdzę jeszcze raz.",
        "Ile jabłek zostało jej w koszyku?",
    ),
    "Turkish": (
        "Önce iki sayıyı toplarız, sonra üçe böleriz.",
        "Yani cevap yedi.",
        "Bir kez daha kontrol edeyim.",
        "Sepetinde kaç elma kaldı?",
    ),
    "Vietnamese": (
        "Trước tiên ta cộng hai số, sau đó chia cho ba.",
        "Vậy đáp án là bảy.",
        "Để tôi kiểm tra lại.",
        "Cô ấy còn lại bao nhiêu quả táo trong giỏ?",
    ),
    "Russian": (
        "Сначала сложим два числа, затем разделим на три.",
        "Значит, ответ семь.",
        "Проверю ещё раз.",
        "Сколько яблок осталось у неё в корзине?",
    ),
    "Ukrainian": (
        "Спочатку додамо два числа, потім поділимо на три.",
        "Отже, відповідь сім.",
        "Перевірю ще раз.",
        "Скільки яблук залишилося у неї в кошику?",
    ),
    "Greek": (
        "Πρώτα προσθέτουμε τους δύο αριθμούς και μετά διαιρούμε με το τρία.",
        "Άρα η απάντηση είναι επτά.",
        "Ας το ελέγξω ξανά.",
        "Πόσα μήλα της έμειναν στο καλάθι;",
    ),
    "Arabic": (
        "نجمع أولا العددين ثم نقسم على ثلاثة.",
        "إذن الجواب سبعة.",
        "سأتحقق مرة أخرى.",
        "كم تفاحة بقيت لديها في السلة؟",
    ),
    "Persian": (
        "ابتدا دو عدد را جمع می‌کنیم و سپس بر سه تقسیم می‌کنیم.",
        "پس پاسخ هفت است.",
        "یک بار دیگر بررسی می‌کنم.",
        "چند سیب در سبد او باقی مانده است؟",
    ),
    "Hebrew": (
        "קודם נחבר את שני המספרים ואז נחלק בשלוש.",
        "לכן התשובה היא שבע.",
        "אבדוק שוב.",
        "כמה תפוחים נשארו לה בסל?",
    ),
    "Hindi": (
        "पहले हम दोनों संख्याओं को जोड़ते हैं, फिर तीन से भाग देते हैं।",
        "तो उत्तर सात है।",
        "मैं फिर से जाँच करता हूँ।",
        "उसकी टोकरी में कितने सेब बचे हैं?",
    ),
    "Thai": (
        "ก่อนอื่นเราบวกเลขสองจำนวน แล้วหารด้วยสาม",
        "ดังนั้นคำตอบคือเจ็ด",
        "ขอตรวจสอบอีกครั้ง",
        "เธอเหลือแอปเปิลในตะกร้ากี่ผล",
    ),
    "Chinese": (
        "首先我们把两个数相加，然后除以三。",
        "所以答案是七。",
        "让我再检查一遍。",
        "她的篮子里还剩下多少个苹果？",
    ),
    "Japanese": (
        "まず二つの数を足して、それから三で割ります。",
        "したがって答えは七です。",
        "もう一度確認します。",
        "彼女のかごにはりんごがいくつ残っていますか？",
    ),
    "Korean": (
        "먼저 두 수를 더한 다음 삼으로 나눕니다.",
        "그러므로 답은 칠입니다.",
        "다시 한번 확인해 보겠습니다.",
        "바구니에 사과가 몇 개 남아 있습니까?",
    ),
}
ASIDE = "\n```python\nfor item in range(10):\n    print(item)\n```\n$$\\sum_{i} x_i$$\n\n"


def own(name: str) -> float:
    """Return the smallest share of an answer in the prompt's language, with code and a formula."""
    *answer, prompt = SAMPLES[name]
    return min(language_share(prompt, text) for text in (ASIDE.join(answer), *answer))


def others(name: str) -> float:
    """Return the mean share of answers in the other languages."""
    prompt = SAMPLES[name][-1]
    shares = [
        language_share(prompt, " ".join(SAMPLES[other][:-1])) for other in SAMPLES if other != name
    ]
    return sum(shares) / len(shares)


def mixed(name: str) -> float:
    """Return the share of an answer with one sentence in the language and one in another."""
    first, *_, prompt = SAMPLES[name]
    other = SAMPLES["German" if name == "English" else "English"][0]
    return language_share(prompt, f"{first} {other}")
