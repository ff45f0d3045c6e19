"""How do I use a trained run in LangChain? As a retriever that returns the chain's passages as documents.

python examples/langchain_retriever.py RUN FOLDER "question"

RUN is the folder of a finished run, FOLDER one with a corpus.jsonl. It needs langchain-core.
"""

import sys

from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict

from retrieval_gym.nn.text_retriever import TextRetriever, load_retriever


class ChainRetriever(BaseRetriever):
    """Walks a greedy chain for each question; see ``TextRetriever.chain``."""

    retriever: TextRetriever
    steps: int = 4
    threshold: float | None = None

    model_config = ConfigDict(arbitrary_types_allowed=True)

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return [
            Document(id=hit.id, page_content=hit.text, metadata={"title": hit.title, "score": hit.score})
            for hit in self.retriever.chain(query, self.steps, self.threshold).hits
        ]


def main(run, folder, *questions):
    """Print the documents of each question."""
    retriever = ChainRetriever(retriever=load_retriever(run, folder))
    for question, documents in zip(questions, retriever.batch(list(questions)), strict=True):
        print(question)
        for document in documents:
            print(f"  {document.metadata['score']:.4f}  {document.metadata['title']}: {document.page_content[:80]}")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit('usage: python examples/langchain_retriever.py RUN FOLDER "question" ["question" ...]')
    main(*sys.argv[1:])
